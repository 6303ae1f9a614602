"""Stored weights: what their codes are worth, and that cutting and joining them changes no number."""

import pytest
import torch

from outrider.engine.kernels.stored_weight import BITS, Kind, StoredWeight, joined_weight
from tests.support.stored_weights import FORMS, INPUTS, OUTPUTS, value_of, weight_of


@pytest.mark.parametrize("kind", BITS)
def test_every_code_has_the_value_of_its_kind(kind: Kind) -> None:
    codes = torch.arange(2 ** BITS[kind])
    codes = codes[(codes & 127 < 127) if kind == "e4m3" else codes >= 0].to(torch.uint8)
    values = StoredWeight.of(kind, codes[None]).values()[0]
    assert values.tolist() == [value_of(kind, int(code)) for code in codes]


@pytest.mark.parametrize("form", FORMS)
def test_weight_is_worth_its_codes_by_their_scales(form: str) -> None:
    weight, numbers = weight_of(form)
    assert weight.shape == (OUTPUTS, INPUTS)
    assert torch.equal(weight.widened(), numbers)
    assert weight.codes.numel() == numbers.numel() * BITS[weight.kind] // 8


@pytest.mark.parametrize("form", FORMS)
def test_part_of_a_weight_has_the_numbers_of_the_whole(form: str) -> None:
    weight, numbers = weight_of(form)
    assert torch.equal(weight.outputs_at(4, 5).widened(), numbers[4:9])
    assert torch.equal(weight.inputs_at(64, 64).widened(), numbers[:, 64:128])
    torn = weight.inputs_at(48, 48)
    assert torch.equal(torn.widened(), numbers[:, 48:96])
    assert torn.group == (16 if weight.scales is not None else 48)


@pytest.mark.parametrize("form", FORMS)
def test_joined_weights_have_the_numbers_of_each(form: str) -> None:
    (first, one), (second, other) = weight_of(form), weight_of(form, 1, 20)
    assert first.layout == second.layout
    assert torch.equal(joined_weight([first, second]).widened(), torch.cat([one, other]))


def test_weights_of_different_forms_have_different_layouts() -> None:
    assert len({weight_of(form)[0].layout for form in FORMS}) == len(FORMS)


@pytest.mark.parametrize(("inputs", "groups"), [(31, 1), (32, 3)])
def test_codes_that_groups_or_bytes_do_not_hold_are_refused(inputs: int, groups: int) -> None:
    with pytest.raises(ValueError, match=f"{inputs} inputs in {groups} groups"):
        StoredWeight.of("int4", torch.zeros(2, inputs).byte(), torch.ones(2, groups))
