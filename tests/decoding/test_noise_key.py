"""Which generations share noise: none that differ in seed, choice or prompt."""

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.noise import gumbel
from outrider.decoding.philox import noise_key
from outrider.decoding.sampling import choose
from outrider.decoding.settings import Sampling
from tests.support.toy import plain_texts, random_model

PROMPT = [5, 0, 7]


def test_key_is_an_unsigned_64_bit_integer_that_never_changes() -> None:
    # Texts can be had again from their seeds only as long as this stays.
    assert noise_key(1234, 0, PROMPT) == 12719544013029647348
    assert 0 <= noise_key(2**64 - 1, 3, []) < 2**64


def test_seed_choice_and_every_prompt_token_change_the_key() -> None:
    keys = [
        noise_key(1234, 0, PROMPT),
        noise_key(1235, 0, PROMPT),
        noise_key(1234, 1, PROMPT),
        noise_key(1234, 0, [5, 0, 8]),
        noise_key(1234, 0, [0, 5, 7]),
        noise_key(1234, 0, [5, 0]),
        noise_key(1234, 0, [5, 0, 7, 0]),
        noise_key(1234, 0, []),
        noise_key(1, 1234, PROMPT),
    ]
    assert len(set(keys)) == len(keys)


def test_four_choices_differ_and_the_first_is_that_of_a_single_one() -> None:
    target = random_model(8, seed=1)
    four = plain_texts(target, Sampling(), [noise_key(1234, choice, PROMPT) for choice in range(4)], 12)
    single = plain_texts(target, Sampling(), [noise_key(1234, 0, PROMPT)], 12)
    assert len(set(four)) == 4
    assert four[0] == single[0]


def test_token_may_differ_between_prompts_under_one_seed() -> None:
    keys = [noise_key(1234, 0, [prompt]) for prompt in range(64)]
    rows = [ChoiceContext(Sampling(), key, 1, (), ()) for key in keys]
    tokens = choose(gumbel([1], [0], 4).expand(64, -1), rows)
    assert len(set(tokens.tolist())) == 4
