"""A check finds what is planted in one of two services, and nothing where nothing is."""

from typing import Any

import pytest

from tests.support.planted import DEFECTS, Defect, Services, services

pytestmark = pytest.mark.asyncio(loop_scope="module")

FEW: dict[str, Any] = {"requests": 4, "answer_tokens": 32}
# What is wrong, how much is asked to find it, and words of the reason.
QUICK: dict[str, tuple[dict[str, Any], str]] = {
    "residual": ({"samples": 96, "sampled_prompts": 1, "sampled_tokens": 4}, "another distribution"),
}
LONG: dict[str, tuple[dict[str, Any], str]] = {
    "top_p": (FEW, "seeded answers part"),
    "bonus": ({"requests": 64}, "seeded answers part"),
    "block": ({"requests": 64}, "seeded answers part"),
    "unverified": ({"requests": 64}, "seeded answers part"),
}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
async def test_check_finds_a_planted_defect(both: Services, name: str) -> None:
    asked, reason = {**QUICK, **LONG}[name]
    report = await both.checked(DEFECTS[name], **asked)
    assert report.differs
    assert any(reason in found for found in report.reasons)


async def test_check_of_equal_services_finds_no_difference(both: Services) -> None:
    report = await both.checked(Defect(), samples=16, sampled_prompts=1, sampled_tokens=4, **FEW)
    assert report.reasons == ()
    assert report.seeded is not None
    assert report.seeded.identical == report.seeded.requests == 4
    assert report.seeded.tokens > 50
    assert report.distributions is not None
    assert report.distributions.test.distance is not None


@pytest.mark.slow
async def test_check_of_equal_services_at_length_finds_no_difference(both: Services) -> None:
    for settings in ({"requests": 96, "samples": 0}, {"requests": 0, "samples": 128, "sampled_prompts": 4}):
        assert (await both.checked(Defect(), verification="rejection", **settings)).reasons == ()


@pytest.mark.slow
async def test_check_finds_another_type_of_weights_unless_the_tolerance_covers_it() -> None:
    async with services(DEFECTS["bfloat16"].b_target) as both:
        report = await both.checked(DEFECTS["bfloat16"], requests=16)
        assert any("log-probabilities" in reason for reason in report.reasons)
        assert report.perplexity is not None
        assert 1e-3 < report.perplexity.largest_difference < 0.5
