"""The training text by kind, and the prompts held out from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from zlib import crc32

from outrider.demo.prompts import KINDS
from workshop.demo.conversations import repetition_document
from workshop.demo.document import Document
from workshop.demo.generated import GENERATORS
from workshop.demo.library import code_documents, prose_documents, source_files
from workshop.demo.picking import EvenRandom

HELD_OUT_PROMPTS = 48
HELD_OUT_FILES = 16  # one in this number of source files is held out
PROMPT_CHARACTERS = 150
EVEN_CHARACTERS = 1000  # characters of training text per uniformly drawn document of a kind
DRAWS = 3000  # generated documents from which held-out prompts are chosen


READING = ("conversations", "tool_calls", "schema_answers")  # kinds whose answers repeat earlier text
REPETITIONS = "repetitions"  # kind that is only used for training


@dataclass(frozen=True)
class Corpus:
    """Training documents, and held-out prompts with which none of them starts, by kind of text."""

    training: dict[str, list[str]]
    even: dict[str, list[str]]  # READING and REPETITIONS, drawn uniformly
    held_out: dict[str, list[str]]


def split(text: str) -> Document:
    """Cuts a library text into a prompt of about PROMPT_CHARACTERS that ends with a word, and the rest."""
    cut = len(text[:PROMPT_CHARACTERS].rsplit(maxsplit=1)[0])
    return Document(text[:cut], text[cut:])


def library_documents(held_out: bool) -> dict[str, list[Document]]:
    """Returns the standard library's code and prose, from the held-out files or from all other files."""
    documents: dict[str, list[Document]] = {"code": [], "prose": []}
    for path in source_files():
        name = Path(*path.parts[-2:]).as_posix()
        if (crc32(name.encode()) % HELD_OUT_FILES == 0) != held_out:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            prose = prose_documents(source)
        except (UnicodeDecodeError, SyntaxError):  # test files with syntax errors or other encodings
            continue
        documents["code"] += map(split, code_documents(source))
        documents["prose"] += map(split, prose)
    return documents


def generated_documents(kind: str, count: int, seed: str) -> list[Document]:
    """Returns `count` documents of a generated kind."""
    random = Random(f"{kind} {seed}")
    return [GENERATORS[kind](random) for _ in range(count)]


def even_documents(count: int) -> dict[str, list[str]]:
    """Returns `count` documents each of READING and REPETITIONS, drawn uniformly."""
    generators = {REPETITIONS: repetition_document, **{kind: GENERATORS[kind] for kind in READING}}
    documents = {}
    for kind, generator in generators.items():
        random = EvenRandom(f"{kind} even")
        documents[kind] = ["".join(generator(random)) for _ in range(count)]
    return documents


def load_corpus(characters: int, draws: int = DRAWS) -> Corpus:
    """Assembles the corpus with at most about `characters` of training text per kind.

    Held-out prompts of library text come from files without training text. Held-out prompts of a generated
    kind come from `draws` documents.
    """
    candidates = library_documents(held_out=True)
    documents = library_documents(held_out=False)
    for kind in GENERATORS:
        candidates[kind] = generated_documents(kind, draws, "held out")
        average = sum(len("".join(document)) for document in candidates[kind]) / draws
        documents[kind] = generated_documents(kind, int(characters / average), "training")
    even = even_documents(characters // EVEN_CHARACTERS)
    held_out, training = {}, {}
    for kind in KINDS:
        random = Random(f"{kind} order")
        # each distinct prompt once, so that most of the common openings stay in training
        prompts = sorted({document.prompt for document in candidates[kind]})
        held_out[kind] = random.sample(prompts, HELD_OUT_PROMPTS)
        kept = without(held_out[kind], map("".join, documents[kind]))
        random.shuffle(kept)
        training[kind] = shorten(kept, characters)
        if kind in READING:
            even[kind] = without(held_out[kind], even[kind])
    return Corpus(training, even, held_out)


def without(held_out: list[str], texts: Iterable[str]) -> list[str]:
    """Returns the texts that start with none of the held-out prompts."""
    return [text for text in texts if not text.startswith(tuple(held_out))]


def shorten(texts: list[str], characters: int) -> list[str]:
    """Returns the first texts that have `characters` in total."""
    total = 0
    for count, text in enumerate(texts):
        total += len(text)
        if total >= characters:
            return texts[: count + 1]
    return texts
