"""Sampling settings: frozen, and refused by name where they make no sense."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.decoding.settings import Sampling


@pytest.mark.parametrize(
    "chosen",
    [
        {"temperature": -0.1},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.1},
        {"temperature": 6e-38},
        {"temperature": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-40},
        {"logit_bias": {50: 1e39}},
        {"logit_bias": {50: math.inf}},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": {-1: 1.0}},
        {"max_tokens": 0},
        {"stop_token_ids": (-1,)},
        {"seed": 2**64},
        {"seed": -1},
        {"logprobs": 21},
        {"verification": "none"},
        {"top_q": 1},
    ],
)
def test_value_out_of_range_is_refused_by_name(chosen: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(chosen))):
        Sampling(**chosen)


def test_settings_that_leave_no_token_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"allowed_token_ids=\[1, 2\] no token is left"):
        Sampling(allowed_token_ids=(1, 2), bad_token_ids=(2, 1, 0))
    with pytest.raises(ValidationError, match="allowed_token_ids"):
        Sampling(allowed_token_ids=())


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    with pytest.raises(ValidationError, match="max_tokens=4 must not be below min_tokens=5"):
        Sampling(min_tokens=5, max_tokens=4)


def test_sampling_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Sampling().temperature = 0.5  # type: ignore[misc]
