"""An audit over real gRPC by a real engine: the gateway's auditor, and a target that did not answer."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.auditor import Auditor
from gateway.sequence import GatewaySequence
from gateway.settings import AuditSettings
from gateway.workers.fleet import Fleet
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from tests.support.demo_pair import prompt_of, text_of
from tests.support.pair import worker_of
from tests.support.patience import eventually
from tests.support.trust import TRUST

COUNT = 50


@pytest.mark.parametrize(
    ("claimed", "outcome"),
    [({"temperature": 0.8}, "same"), ({"temperature": 0.8, "logprobs": 2}, "same"), ({}, "differs")],
    ids=["as answered", "with log-probabilities", "at another temperature"],
)
async def test_audit_by_a_real_target_finds_whether_the_settings_gave_the_answer(
    claimed: dict[str, Any], outcome: str
) -> None:
    prompt = prompt_of("prose")
    sequence = GatewaySequence(
        prompt,
        Sampling(max_tokens=COUNT, ignore_eos=True, **claimed),
        noise_key(1, 0, prompt),
        generated=[*text_of(prompt, COUNT, temperature=0.8)],
        served_by=["another target"],
    )
    async with worker_of("target", 0.0) as worker:
        fleet = Fleet(lambda: [replace(worker, settings={"dtype": "float32"})], TRUST)
        auditor = Auditor(AuditSettings(fraction=1.0), fleet)
        auditor.offer(sequence)
        await eventually(lambda: auditor.counts.answers.total())
        await fleet.close()
    assert auditor.counts.answers == {outcome: 1}
    assert auditor.counts.tokens == COUNT
