"""Types of decoding/ survive the conversion to a message and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.settings import SMALLEST_TEMPERATURE, Sampling
from outrider.drafters.known_texts import KnownTexts
from outrider.drafters.occurrences import END
from outrider.pace.step import Step, StepSize
from protos import generation_pb2, rounds_pb2
from protos.conversions import (
    draft_from_message,
    draft_to_message,
    sampling_from_message,
    sampling_to_message,
    step_from_message,
    step_to_message,
    texts_from_message,
)

token_ids = st.integers(0, 2**32 - 1)
samplings = st.builds(
    Sampling,
    temperature=st.just(0.0) | st.floats(SMALLEST_TEMPERATURE, 100),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 5),
    max_tokens=st.integers(5, 1000),
    stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    bad_token_ids=st.lists(st.integers(10, 99), max_size=3).map(tuple),
    seed=st.none() | st.integers(0, 2**64 - 1),
    noise_scope=st.sampled_from(["prompt", "seed"]),
    logprobs=st.none() | st.integers(0, 20),
    logprobs_of=st.sampled_from(["raw", "processed"]),
    verification=st.sampled_from(["coupled", "rejection", "block"]),
)


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@given(samplings)
def test_sampling_survives_the_wire(sampling):
    assert sampling_from_message(over_the_wire(sampling_to_message(sampling))) == sampling


def test_sampling_message_has_a_field_for_every_setting():
    assert set(generation_pb2.Sampling.DESCRIPTOR.fields_by_name) == set(Sampling.model_fields)


def test_sampling_empty_message_means_the_defaults():
    assert sampling_from_message(generation_pb2.Sampling()) == Sampling()


def test_sampling_value_out_of_range_is_refused_by_name():
    with pytest.raises(ValidationError, match="top_p"):
        sampling_from_message(generation_pb2.Sampling(top_p=1.5))


@pytest.mark.parametrize(
    "draft",
    [
        Draft(),
        Draft.chain([4, 0, 4]),
        Draft(tokens=(1, 2, 3), parents=(-1, -1, 1)),
        Draft.chain([1], [SparseProbs((1, 7), (0.1, 0.9))]),
    ],
    ids=["empty", "chain", "tree", "sparse probabilities"],
)
def test_draft_survives_the_wire(draft):
    assert draft_from_message(over_the_wire(draft_to_message(draft))) == draft


def test_draft_malformed_tree_is_refused():
    with pytest.raises(ValueError, match="parents"):
        draft_from_message(rounds_pb2.Draft(tokens=[1, 2], parents=[-1, 1]))


def test_step_survives_the_conversion() -> None:
    step = Step(7, StepSize(2, 10, 3, 400), 0.25, experts_read=0.3125, is_early=True)
    assert step_from_message(step_to_message(step)) == step


def test_texts_of_an_opening_have_an_end_after_each_past_answer():
    past = [generation_pb2.TokenIds(ids=answer) for answer in ((1, 2), (3,))]
    opening = over_the_wire(rounds_pb2.Open(predicted=[7, 8], past=past))
    assert texts_from_message(opening) == KnownTexts((7, 8), (1, 2, END, 3, END))
    assert texts_from_message(rounds_pb2.Open()) == KnownTexts()
