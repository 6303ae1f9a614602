"""``outrider audit``: an honest answer, and what is found of every other one."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from outrider.cli.audit_command import DIFFERS, HONEST, UNKNOWN
from outrider.cli.command_line import main
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from outrider.receipts.digests import tokenizer_digest, weights_digest
from outrider.receipts.receipt import Numerics, Receipt
from tests.support.demo_pair import engine, prompt_of
from tests.support.receipts import key, public_pem_of

TARGET, COUNT, SEED = str(DEMO / "target"), 60, 3
SAMPLING = Sampling(max_tokens=COUNT, ignore_eos=True, temperature=0.7, seed=SEED)


@pytest.fixture(scope="module")
def of_int8() -> Engine:
    return Engine.from_settings(
        EngineSettings(model=TARGET, dtype="float32", quantization="int8", threads=1, cache_memory=2**26)
    )


def receipt_of(answering: Engine, answered: Sampling = SAMPLING, **fields: Any) -> Receipt:
    """The receipt of an answer, which names the target as it is and SAMPLING, whatever has answered."""
    prompt = prompt_of("prose")
    request = OfflineRequest(prompt, answered, answered.noise_key(0, prompt))
    (output,) = generate(answering, None, [request], 0)
    told = {
        "model": "m",
        "weights": weights_digest(TARGET),
        "tokenizer": tokenizer_digest(TARGET),
        "adapter": "",
        "numerics": Numerics(dtype="float32"),
        "prompt": prompt,
        "answer": output.tokens,
        "choice": 0,
        "sampling": SAMPLING,
        "stop": (),
        "finish_reason": output.finish,
        "created": 1,
        "key": "",
        **fields,
    }
    return Receipt(**told).signed(key())


@pytest.fixture
def audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(receipt: Receipt, *options: str) -> tuple[int, str]:
        (tmp_path / "receipt.json").write_text(receipt.model_dump_json())
        (tmp_path / "key.pem").write_bytes(public_pem_of(key()))
        code = main(
            [
                "audit",
                str(tmp_path / "receipt.json"),
                *("--model", TARGET, "--public-key", str(tmp_path / "key.pem")),
                *options,
            ]
        )
        return code, capsys.readouterr().out

    return run


def test_honest_answer_whose_noise_all_prompts_share_is_honest(audit: Any) -> None:
    shared = SAMPLING.model_copy(update={"noise_scope": "seed"})
    code, said = audit(receipt_of(engine("target"), shared, sampling=shared))
    assert code == HONEST, said


def test_audit_of_an_honest_answer_says_honest(audit: Any) -> None:
    code, said = audit(receipt_of(engine("target")))
    assert code == HONEST
    assert said.endswith(f"receipt.json: honest, {COUNT} tokens, each is the choice\n")


def test_answer_of_quantized_weights_differs(audit: Any, of_int8: Engine) -> None:
    code, said = audit(receipt_of(of_int8))
    assert code == DIFFERS
    assert "nats from the choice" in said


def test_answer_at_another_temperature_differs(audit: Any) -> None:
    hotter = SAMPLING.model_copy(update={"temperature": 1.0})
    code, said = audit(receipt_of(engine("target"), hotter))
    assert code == DIFFERS
    assert "nats from the choice" in said


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weights": "0" * 64}, "its weights are others than those in"),
        ({"tokenizer": "0" * 64}, "its tokenizer are others than those in"),
        ({"adapter": "00"}, "its adapter is another one"),
        ({"finish_reason": "stop"}, "it does not end by finish_reason 'stop'"),
    ],
)
def test_receipt_that_names_something_else_differs(audit: Any, fields: dict[str, Any], reason: str) -> None:
    code, said = audit(receipt_of(engine("target"), **fields))
    assert code == DIFFERS
    assert reason in said


def test_receipt_of_another_key_differs(audit: Any) -> None:
    code, said = audit(receipt_of(engine("target")).signed(Ed25519PrivateKey.generate()))
    assert code == DIFFERS
    assert "its signature is not of this key" in said


def test_audit_as_json_tells_figures_and_no_tokens(audit: Any) -> None:
    _, said = audit(receipt_of(engine("target")), "--json", "-")
    (found,) = json.loads(said)
    assert (found["honest"], found["tokens"], found["wrong"]) == (True, COUNT, 0)
    assert found["receipt"]["sampling"]["seed"] == SEED
    assert "answer" not in found["receipt"]


def test_audit_of_something_else_than_a_receipt_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('{"version": 1}')
    assert main(["audit", str(tmp_path / "other.json"), "--model", TARGET]) == UNKNOWN
    assert "other.json: model: Field required" in capsys.readouterr().err
