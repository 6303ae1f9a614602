"""Tables that the generated questions, records and stories draw from, the likeliest entries first."""

# country, capital, continent, language
COUNTRIES = [
    ("France", "Paris", "Europe", "French"),
    ("Japan", "Tokyo", "Asia", "Japanese"),
    ("Italy", "Rome", "Europe", "Italian"),
    ("Kenya", "Nairobi", "Africa", "Swahili"),
    ("Spain", "Madrid", "Europe", "Spanish"),
    ("Peru", "Lima", "South America", "Spanish"),
    ("Norway", "Oslo", "Europe", "Norwegian"),
    ("Egypt", "Cairo", "Africa", "Arabic"),
    ("Portugal", "Lisbon", "Europe", "Portuguese"),
    ("Greece", "Athens", "Europe", "Greek"),
    ("Chile", "Santiago", "South America", "Spanish"),
    ("Poland", "Warsaw", "Europe", "Polish"),
    ("Vietnam", "Hanoi", "Asia", "Vietnamese"),
    ("Austria", "Vienna", "Europe", "German"),
    ("Cuba", "Havana", "North America", "Spanish"),
    ("Sweden", "Stockholm", "Europe", "Swedish"),
    ("Thailand", "Bangkok", "Asia", "Thai"),
    ("Morocco", "Rabat", "Africa", "Arabic"),
    ("Ireland", "Dublin", "Europe", "English"),
    ("Hungary", "Budapest", "Europe", "Hungarian"),
    ("Mexico", "Mexico City", "North America", "Spanish"),
    ("Finland", "Helsinki", "Europe", "Finnish"),
    ("Denmark", "Copenhagen", "Europe", "Danish"),
    ("Mongolia", "Ulaanbaatar", "Asia", "Mongolian"),
]

# animal, legs, home, food
ANIMALS = [
    ("cat", "four", "a house", "fish"),
    ("dog", "four", "a house", "meat"),
    ("spider", "eight", "a web", "flies"),
    ("rabbit", "four", "a burrow", "carrots"),
    ("bee", "six", "a hive", "nectar"),
    ("hen", "two", "a barn", "corn"),
    ("horse", "four", "a stable", "hay"),
    ("beetle", "six", "a log", "leaves"),
    ("fox", "four", "a den", "berries"),
    ("duck", "two", "a pond", "bread"),
    ("bear", "four", "a cave", "honey"),
    ("crab", "ten", "the sea", "worms"),
]

OPPOSITES = [
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("day", "night"),
    ("open", "closed"),
    ("early", "late"),
    ("empty", "full"),
    ("hard", "soft"),
    ("old", "new"),
    ("high", "low"),
    ("wet", "dry"),
    ("strong", "weak"),
]

# thing, colour, place
THINGS = [
    ("grass", "green", "in the garden"),
    ("the sky", "blue", "above us"),
    ("a banana", "yellow", "at the market"),
    ("snow", "white", "on the mountain"),
    ("a tomato", "red", "in the garden"),
    ("coal", "black", "under the ground"),
    ("a carrot", "orange", "in the garden"),
    ("a leaf in autumn", "brown", "in the forest"),
]

# Python name, what it does, an example call
BUILTINS = [
    ("len", "returns the number of items in a container", "len([1, 2, 3])"),
    ("sorted", "returns a new list with the items in order", "sorted([3, 1, 2])"),
    ("print", "writes its arguments to the screen", "print('hello')"),
    ("range", "counts from a start to a stop", "range(10)"),
    ("sum", "adds the items of an iterable", "sum([1, 2, 3])"),
    ("max", "returns the largest item", "max(4, 7)"),
    ("min", "returns the smallest item", "min(4, 7)"),
    ("zip", "walks over several iterables together", "zip('ab', [1, 2])"),
    ("enumerate", "yields each item with its index", "enumerate('ab')"),
    ("open", "opens a file and returns a file object", "open('notes.txt')"),
    ("isinstance", "tells whether an object is of a class", "isinstance(1, int)"),
    ("abs", "returns the value of a number without its sign", "abs(-5)"),
]

NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBER_WORDS += ["eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"]
NUMBER_WORDS += ["nineteen", "twenty"]

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Lily", "Max"]
SURNAMES = ["Miller", "Stone", "Baker", "Wood", "Fisher", "Young", "Brook", "Hill"]
CITIES = ["Berlin", "London", "Madrid", "Oslo", "Rome", "Vienna", "Lisbon", "Prague"]
PRODUCTS = ["notebook", "pencil", "lamp", "chair", "teapot", "bicycle", "camera", "blanket"]
COLOURS = ["blue", "red", "green", "black", "white", "yellow"]
