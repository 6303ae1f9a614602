"""A real `serve run cluster.app` with the demo pair, over HTTP and gRPC."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil  # type: ignore[import-untyped]
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from outrider.demo.prompts import KINDS, prompts
from protos import generation_pb2, generation_pb2_grpc
from tests.support.patience import LIMIT_S
from tests.support.running import Service
from tests.support.served import SERVED

JSON_PROMPT = prompts("json", 1)[0]
MODES: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "fixed": {"mode": "fixed", "depth": 4},
    "deep": {"mode": "fixed", "depth": 8},
    "n-gram": {"mode": "fixed", "depth": 4, "drafter": "ngram"},
    "mixed": {"mode": "fixed", "depth": 4, "drafter": "model+suffix"},
}


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_draft_and_target_are_processes_of_their_own(client: httpx.Client, service: Service) -> None:
    found = client.get("/health").json()["workers"]
    workers = {worker["role"]: worker["pid"] for worker in found}
    assert workers.keys() == {"target", "draft"}
    # While a method runs Ray adds its name to that of the process.
    names = {child.pid: child.name().partition(".")[0] for child in service.process.children(recursive=True)}
    assert names[workers["target"]] == "ray::ServeReplica:default:target"
    assert names[workers["draft"]] == "ray::ServeReplica:default:draft-model"
    gateways = [pid for pid, name in names.items() if name == "ray::ServeReplica:default:gateway"]
    assert len({*gateways, *workers.values()}) == 3
    for worker in found:
        [engine] = worker["ranks"]
        assert psutil.Process(engine).ppid() == worker["pid"]
        assert loads_torch(engine)
        assert not loads_torch(worker["pid"])


def loads_torch(pid: int) -> bool:
    return any("libtorch" in mapped.path for mapped in psutil.Process(pid).memory_maps())


def test_processes_of_ray_get_their_share_of_a_busy_machine(service: Service) -> None:
    of_ray = [child for child in service.process.children(recursive=True) if "ray::" in child.name()]
    assert len(of_ray) > 3
    assert {child.nice() for child in of_ray} == {service.process.nice()}


def test_workers_tell_what_they_run_with(client: httpx.Client) -> None:
    settings = {worker["role"]: worker["settings"] for worker in client.get("/health").json()["workers"]}
    target, draft = settings["target"], settings["draft"]
    assert (target["dtype"], target["device"], target["tensor_parallel"]) == ("float32", "cpu", 1)
    assert (target["threads"], target["cache_memory"]) == (
        SERVED["target.threads"],
        SERVED["target.cache_memory"],
    )
    assert (target["draft_ahead"], draft["draft_ahead"]) == (0, 12)


def test_memory_plan_is_printed_once(service: Service, tmp_path_factory: pytest.TempPathFactory) -> None:
    (log,) = tmp_path_factory.getbasetemp().glob("elsewhere[0-9]*/serve.log")
    assert log.read_text().count("GB on each device") == 1


def test_json_takes_fewer_target_passes_than_tokens(client: httpx.Client) -> None:
    fixed = MODES["fixed"]
    usage = complete(client, prompt=JSON_PROMPT, max_tokens=64, temperature=0, speculation=fixed)["usage"]
    assert usage["speculation"]["target_passes"] < usage["completion_tokens"] / 2


def test_stream_is_the_whole_answer_in_pieces(client: httpx.Client) -> None:
    request = {"prompt": JSON_PROMPT, "max_tokens": 40, "temperature": 0.7, "seed": 5}
    whole = complete(client, **request)
    chunks = streamed(client, **request)
    assert len(chunks) > 2
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_drawn_seed_is_reported_and_gives_the_text_again(client: httpx.Client) -> None:
    request = {"prompt": prompts("prose", 1)[0], "max_tokens": 24, "temperature": 1.0}
    first = complete(client, **request)
    again = complete(client, **request, seed=first["usage"]["speculation"]["seed"])
    assert again["choices"] == first["choices"]


def test_service_gives_one_text_per_seed_however_it_is_drafted(client: httpx.Client) -> None:
    """100 requests over four modes. A difference would have to be a near-tie; none is expected in float32."""
    differing = []
    for number in range(25):
        prompt = prompts(KINDS[number % len(KINDS)], 5)[number % 5]
        request = {
            "prompt": prompt,
            "max_tokens": 32,
            "temperature": (0.0, 0.7, 1.0, 1.3)[number % 4],
            "top_p": (1.0, 0.9)[number % 2],
            "seed": number,
        }
        texts = {
            name: complete(client, **request, speculation=mode)["choices"] for name, mode in MODES.items()
        }
        differing += [(number, name) for name in MODES if texts[name] != texts["off"]]
    assert not differing


def test_stop_string_ends_the_text_before_it(client: httpx.Client) -> None:
    whole = complete(client, prompt=JSON_PROMPT, max_tokens=48, temperature=0)["choices"][0]["text"]
    stop = whole[20:24]
    for mode in MODES.values():
        choice = complete(
            client, prompt=JSON_PROMPT, max_tokens=48, temperature=0, stop=stop, speculation=mode
        )["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"


def test_models_endpoint_lists_the_target(client: httpx.Client) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["outrider-demo-small"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"speculation": {"mode": "fixed", "depth": 99}}, "speculation.depth"),
        ({"depht": 4}, "depht"),
        ({"prompt": [99999]}, "prompt"),
        ({"logit_bias": {"99999": 1.0}}, "logit_bias"),
    ],
)
def test_bad_input_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], named: str) -> None:
    response = client.post("/v1/completions", json={"prompt": "x", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == named


def generate(service: Service, request: generation_pb2.GenerateRequest) -> list[generation_pb2.GenerateChunk]:
    with grpc.insecure_channel(service.grpc) as channel:
        return list(generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=LIMIT_S))


def test_grpc_streams_what_http_answers(client: httpx.Client, service: Service) -> None:
    http = complete(client, prompt=JSON_PROMPT, max_tokens=40, temperature=0.7, seed=11)
    chunks = generate(
        service,
        generation_pb2.GenerateRequest(
            text=JSON_PROMPT,
            sampling=generation_pb2.Sampling(max_tokens=40, temperature=0.7, seed=11),
        ),
    )
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == http["choices"][0]["text"]
    assert chunks[-1].finish_reason == http["choices"][0]["finish_reason"]
    assert sum(len(chunk.token_ids) for chunk in chunks) == http["usage"]["completion_tokens"]
    assert chunks[-1].usage.completion_tokens == http["usage"]["completion_tokens"]


def test_gateway_s_own_port_answers_as_the_proxy_does(service: Service) -> None:
    request = generation_pb2.GenerateRequest(
        text=JSON_PROMPT,
        sampling=generation_pb2.Sampling(max_tokens=24, temperature=0.7, seed=5),
        speculation=generation_pb2.SpeculationSettings(mode="fixed", depth=4),
    )
    texts = []
    for address in (service.grpc, service.direct):
        with grpc.insecure_channel(address) as channel:
            chunks = stub_of(channel).Generate(request, timeout=LIMIT_S)
            texts.append("".join(piece for chunk in chunks for piece in [chunk.text]))
    assert texts[0] == texts[1] != ""
    with grpc.insecure_channel(service.direct) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        request.sampling.top_p = 2.0
        with pytest.raises(grpc.RpcError) as refused:
            list(stub_of(channel).Generate(request, timeout=LIMIT_S))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p" in str(refused.value.details())


def test_grpc_names_the_bad_field(service: Service) -> None:
    request = generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.Sampling(top_p=2.0))
    with pytest.raises(grpc.RpcError) as caught:
        generate(service, request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p" in (caught.value.details() or "")


def stub_of(channel: grpc.Channel) -> generation_pb2_grpc.GenerationStub:
    return generation_pb2_grpc.GenerationStub(channel)


def test_rest_of_the_grpc_api_answers_through_the_proxy(client: httpx.Client, service: Service) -> None:
    http = complete(client, prompt=JSON_PROMPT, max_tokens=24, temperature=0)
    with grpc.insecure_channel(service.grpc) as channel:
        stub = stub_of(channel)
        whole = stub.Complete(
            generation_pb2.GenerateRequest(
                text=JSON_PROMPT, sampling=generation_pb2.Sampling(max_tokens=24, temperature=0)
            ),
            timeout=LIMIT_S,
        )
        tokens = stub.Tokenize(generation_pb2.TokenizeRequest(text=JSON_PROMPT), timeout=LIMIT_S)
        text = stub.Detokenize(generation_pb2.DetokenizeRequest(ids=tokens.ids), timeout=LIMIT_S)
        model = stub.GetModel(generation_pb2.GetModelRequest(), timeout=LIMIT_S)
        loads = stub.GetLoads(generation_pb2.GetLoadsRequest(), timeout=LIMIT_S)
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
    assert whole.choices[0].text == http["choices"][0]["text"]
    assert text.text == JSON_PROMPT
    assert (
        {worker.role for worker in model.workers}
        == {load.role for load in loads.workers}
        == {"target", "draft"}
    )
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_services_can_be_found_by_reflection(service: Service) -> None:
    with grpc.insecure_channel(service.grpc) as channel:
        names = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"outrider.v1.Generation", "grpc.health.v1.Health"} <= set(names)


def test_trace_context_is_accepted(service: Service) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with grpc.insecure_channel(service.grpc) as channel:
        metadata = (("traceparent", traceparent),)
        model = stub_of(channel).GetModel(
            generation_pb2.GetModelRequest(), timeout=LIMIT_S, metadata=metadata
        )
    assert model.id == "outrider-demo-small"


def test_openai_client_gets_an_answer_to_a_chat(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.http}/v1", api_key="none", max_retries=0) as client:
        question = {"role": "user", "content": "What is the capital of France?"}
        fields: Any = {
            "model": "outrider-demo-small",
            "messages": [question],
            "max_tokens": 24,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2, n=2)
        stream = client.chat.completions.create(**fields, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{**fields, "temperature": -1})
    assert whole.choices[0].message.content == whole.choices[1].message.content == streamed
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens / 2


def test_command_line_streams_an_answer(service: Service) -> None:
    command = [
        str(Path(sys.executable).parent / "outrider"),
        "generate",
        JSON_PROMPT,
        "--address",
        service.grpc,
    ]
    # Rounds as told: on a machine that is busy with other things the pace may find that they do not pay.
    arguments = [
        "--max-tokens",
        "24",
        "--temperature",
        "0",
        "--color",
        "always",
        "--speculation",
        "fixed",
        "--depth",
        "4",
    ]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert "\033[32m" in run.stdout
    assert "24 tokens in" in run.stderr
    wrong = subprocess.run([*command, "--temperature", "-1"], capture_output=True, text=True, timeout=LIMIT_S)
    assert wrong.returncode == 1
    assert "temperature" in wrong.stderr


def test_prompts_do_not_appear_in_the_logs(client: httpx.Client, service: Service) -> None:
    secret = "Xylophone-4711"
    complete(client, prompt=f"{secret} {JSON_PROMPT}", max_tokens=8)
    client.post("/v1/completions", json={"prompt": secret, "max_tokens": 0})
    logs = Path("/tmp/ray/session_latest/logs")
    texts = [file.read_text(errors="replace") for file in logs.rglob("*") if file.is_file()]
    assert any("worker" in text for text in texts)
    assert not any(secret in text for text in texts)
