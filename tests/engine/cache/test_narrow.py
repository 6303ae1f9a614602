"""A narrow cache rounds each number alone, and is read exactly."""

import torch

from outrider.engine.cache.narrow import LARGEST, NARROW, narrowed, widened

CODES = torch.arange(256, dtype=torch.uint8).view(NARROW)


def test_narrowed_number_of_the_narrow_type_stays_as_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        stored = narrowed(widened(CODES, dtype), NARROW)
        assert torch.equal(widened(stored, dtype).nan_to_num(1e6), CODES.to(dtype).nan_to_num(1e6))


def test_narrowed_number_out_of_range_becomes_the_largest() -> None:
    numbers = torch.tensor([LARGEST, 464.0, 1e30, -1e30])
    assert narrowed(numbers, NARROW).float().tolist() == [LARGEST, LARGEST, LARGEST, -LARGEST]


def test_narrowed_number_that_is_not_finite_becomes_nan() -> None:
    numbers = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert narrowed(numbers, NARROW).isnan().all()


def test_narrowed_number_between_two_goes_to_the_nearer_and_to_the_even_of_equals() -> None:
    numbers = torch.tensor([1.06, 1.0625, 1.07, 1.1875, 2.0**-10, 1.01 * 2.0**-10])
    assert narrowed(numbers, NARROW).float().tolist() == [1.0, 1.0, 1.125, 1.25, 0.0, 2.0**-9]


def test_numbers_of_the_models_own_type_are_left_as_they_are() -> None:
    numbers = torch.tensor([1e30, torch.inf])
    assert narrowed(numbers, torch.float32) is numbers
    assert widened(numbers, torch.float32) is numbers
