"""What a deployment takes of its devices, and what is refused before it starts."""

import json
import re
from collections.abc import Mapping

import pytest
import ray
from transformers import Qwen3MoeConfig

from cluster import application
from cluster.amounts import parse_bytes
from cluster.arguments import read_settings
from cluster.devices import memories
from cluster.gpus import ask_nodes, size_for
from cluster.groups import WorkerSettings
from cluster.plan import DeploymentPlan
from cluster.preflight import Preflight, find
from outrider.cli.command_line import main
from outrider.demo.prompts import DEMO

GB = 10**9
TARGET, DRAFT = "target", "drafts.model"
ON_GPUS = {f"{TARGET}.gpus": 1.0, f"{DRAFT}.gpus": 1.0}
ON_ONE_GPU = {f"{TARGET}.gpus": 0.5, f"{DRAFT}.gpus": 0.5}
SMALL = {"target": "demo-small"}
TARGET_ALONE = {"target": str(DEMO / "target"), "target.dtype": "float32"}


def of_both(name: str, value: float) -> dict[str, float]:
    return {f"{TARGET}.{name}": value, f"{DRAFT}.{name}": value}


def plan(
    arguments: Mapping[str, object], memory: int = 4 * GB, draft_memory: int = 2 * GB, gpus: int = 0
) -> DeploymentPlan:
    settings = read_settings({**SMALL, **arguments}).with_gpus(gpus)
    sizes = memories(settings, memory, draft_memory)
    assert sizes is not None
    return DeploymentPlan(settings, sizes)


@pytest.mark.parametrize(
    ("fields", "devices"),
    [
        ({}, [{"target": 1, "draft": 1}]),  # without GPUs the device is the machine
        ({"target.replicas": 2, "drafts.model.replicas": 3}, [{"target": 2, "draft": 3}]),
        ({"target.tensor_parallel": 2}, [{"target": 2, "draft": 1}]),
        ({"target.resources": {"big": 1.0}}, [{"target": 1}, {"draft": 1}]),
        (ON_GPUS, [{"target": 1}, {"draft": 1}]),
        ({**ON_GPUS, "target.replicas": 4, "target.tensor_parallel": 2}, [{"target": 1}, {"draft": 1}]),
        (ON_ONE_GPU, [{"target": 1, "draft": 1}]),
        ({**ON_ONE_GPU, "target.replicas": 2}, [{"target": 2}, {"draft": 1}]),
        ({**ON_ONE_GPU, "drafts.model.accelerator": "L4"}, [{"target": 1}, {"draft": 1}]),
        (
            {**ON_GPUS, "drafts.model.gpus": 0.25, "drafts.model.replicas": 6},
            [{"target": 1}, {"draft": 4}],
        ),
    ],
    ids=str,
)
def test_plan_places_workers_on_devices(fields, devices):
    deployment = plan(fields)
    found = [{part.role: part.per_device for part in device.parts} for device in deployment.devices]
    assert found == devices


TWO_ON_GPUS = {
    "target.gpus": 1.0,
    "drafts.model.gpus": 0.5,
    "drafts.model.accelerator": "L4",
    "drafts.code.gpus": 0.5,
}


@pytest.mark.parametrize(
    ("fields", "devices"),
    [
        ({"drafts.model.threads": 1, "drafts.code.threads": 1}, [["target", "draft", "drafts.code"]]),
        (TWO_ON_GPUS, [["target"], ["draft"], ["drafts.code"]]),
        ({**TWO_ON_GPUS, "drafts.code.accelerator": "L4"}, [["target"], ["draft", "drafts.code"]]),
        (
            {**TWO_ON_GPUS, "drafts.code.accelerator": "L4", "drafts.code.gpus": 0.75},
            [["target"], ["draft"], ["drafts.code"]],
        ),
    ],
    ids=str,
)
def test_drafts_share_a_device_where_ray_puts_them_together(fields, devices):
    found = [[part.title for part in device.parts] for device in plan(fields).devices]
    assert found == devices


def test_plan_gives_each_draft_its_own_cache():
    found = plan({"drafts.model.max_sequences": 4, "drafts.code.max_sequences": 8}).settings
    assert found.draft_engine("code").cache_memory == 2 * found.draft_engine("model").cache_memory


def test_target_gives_nothing_to_the_draft_beside_it():
    alone = plan(TARGET_ALONE)
    beside = plan({"gateway.drafters": '["model"]'})
    assert beside.target.plan == alone.target.plan
    assert beside.devices[0].left == alone.devices[0].left - beside.devices[0].parts[1].taken


def test_caches_that_were_left_open_are_by_need_and_part_of_the_settings():
    found = plan(of_both("max_sequences", 4)).settings
    target, draft = plan(of_both("max_sequences", 4)).devices[0].parts
    blocks = 4 * 2048 // 16
    assert found.target_engine().cache_memory == blocks * target.plan.block
    assert found.draft_engine("model").cache_memory == blocks * draft.plan.block
    given = plan(of_both("cache_memory", 10**8)).settings
    assert given.target_engine().cache_memory == given.draft_engine("model").cache_memory == 10**8


@pytest.mark.parametrize(
    ("memory", "fields"),
    [
        (20 * GB, of_both("replicas", 4)),
        (10 * GB, {"target.replicas": 2, "target.max_replicas": 3}),
        (40 * GB, {**of_both("gpus", 0.25), "target.replicas": 3}),
        (40 * GB, {"target.gpus": 0.75, "drafts.model.gpus": 0.25}),
    ],
    ids=str,
)
def test_plan_of_a_shared_device_shares_its_memory(memory, fields):
    deployment = plan(fields, memory)
    deployment.check()
    for device in deployment.devices:
        caches = sum(part.per_device * part.plan.cache for part in device.parts)
        assert device.left >= 0
        assert caches > 0.1 * device.memory


def test_default_cache_takes_what_is_left_of_a_gpu_but_a_margin():
    (target, draft) = plan(ON_GPUS, memory=80 * GB, draft_memory=24 * GB).devices
    for device in (target, draft):
        (part,) = device.parts
        assert 0.05 * device.memory <= device.left < 0.05 * device.memory + 2 * part.plan.block


def test_default_cache_that_has_no_room_in_its_part_of_a_gpu_is_refused():
    """Fewer sequences are not proposed: with a named cache as many would fit."""
    with pytest.raises(ValueError, match=r"target=.*target\.cache_memory=\d+ would fit"):
        plan({**ON_ONE_GPU, **of_both("max_sequences", 1050)}).check()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({**TARGET_ALONE, "target.cache_memory": 0.9}, "target.cache_memory"),
        ({"drafts.model.cache_memory": 0.9}, "drafts.model.cache_memory"),
        ({**ON_GPUS, "drafts.model.cache_memory": 0.9}, "drafts.model.cache_memory"),
        ({"drafts.small.cache_memory": 0.9}, "drafts.small.cache_memory"),
        ({**TARGET_ALONE, "target.max_sequences": 65536}, "target.max_sequences"),
        ({**TARGET_ALONE, "target.replicas": 3, "target.cache_memory": 0.3}, "target.cache_memory"),
    ],
    ids=str,
)
def test_plan_refusal_names_values_that_fit(fields, named):
    with pytest.raises(ValueError) as refused:
        plan(fields).check()
    options = dict(re.findall(r"([\w.]+)=(\d+)", str(refused.value)))
    assert named in options
    plan({**fields, named: int(options[named])}).check()


def test_cache_that_just_fits_is_the_largest():
    def plan_with(cache: float) -> DeploymentPlan:
        return plan({**ON_GPUS, "target.cache_memory": cache})

    target = plan_with(0.9).target
    cache = target.largest_cache(4 * GB)
    assert plan_with(cache).devices[0].left >= 0
    assert plan_with(cache + target.plan.block).devices[0].left < 0


@pytest.mark.slow
def test_model_too_large_for_any_setting_is_named():
    with pytest.raises(
        ValueError, match=r"target='.*target' takes .* of a device with 0.10 GB: more target\.tensor_par"
    ):
        plan(ON_GPUS, memory=10**8).check()


def test_devices_are_as_large_as_the_settings_or_the_caller_say(monkeypatch):
    on_gpus = read_settings(
        {**SMALL, **ON_GPUS, "target.accelerator": "H100", "drafts.model.accelerator": "L4"}
    )
    assert memories(on_gpus) == {TARGET: 80 * GB, DRAFT: 24 * GB}
    assert memories(on_gpus, here=False) == {TARGET: 80 * GB, DRAFT: 24 * GB}
    assert memories(on_gpus, 7, 5) == {TARGET: 7, DRAFT: 5}
    assert memories(on_gpus, 7) == {TARGET: 7, DRAFT: 7}
    on_cpus = read_settings(SMALL).with_gpus(0)
    assert memories(on_cpus) is not None
    assert memories(on_cpus, here=False) is None
    monkeypatch.setattr("cluster.devices.gpus_here", lambda: [])
    assert memories(read_settings(ON_GPUS)) is None
    monkeypatch.setattr("cluster.devices.gpus_here", lambda: [8, 6])
    assert memories(read_settings(ON_GPUS)) == {TARGET: 6, DRAFT: 6}


def test_memory_of_cards_of_two_sizes_is_asked_of_their_nodes():
    fields = {"target.accelerator": "A100", "drafts.model.accelerator": "L4"}
    on_gpus = read_settings({**SMALL, **ON_GPUS, **fields})
    assert memories(on_gpus, here=False) is None
    assert memories(on_gpus, here=False, asked={TARGET: 79 * GB}) == {TARGET: 79 * GB, DRAFT: 24 * GB}
    assert memories(on_gpus, 7, here=False, asked={TARGET: 79 * GB}) == {TARGET: 7, DRAFT: 7}


def test_memory_of_a_draft_that_is_not_there_is_that_of_the_target_s_node():
    alone = read_settings({**TARGET_ALONE, "target.gpus": 1.0})
    assert not alone.drafts
    assert memories(alone, here=False, asked={TARGET: 79 * GB}) == {TARGET: 79 * GB, DRAFT: 79 * GB}


NODES: tuple[tuple[dict[str, float], list[int]], ...] = (
    ({"GPU": 2.0, "accelerator_type:A100": 1.0, "big": 2.0}, [80 * GB, 79 * GB]),
    ({"GPU": 1.0, "accelerator_type:A100": 1.0}, [40 * GB]),
    ({"GPU": 1.0, "accelerator_type:L4": 1.0}, [24 * GB]),
    ({"GPU": 1.0, "mute": 1.0}, []),
)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"resources": {"big": 1.0}}, 79 * GB),
        ({"accelerator": "A100", "resources": {"big": 1.0}}, 79 * GB),
        ({"accelerator": "L4"}, 24 * GB),
        ({"accelerator": "A100"}, None),  # cards of two sizes have this name: Ray may take either
        ({}, None),
        ({"resources": {"mute": 1.0}}, None),
    ],
    ids=str,
)
def test_size_for_a_worker_is_that_of_the_nodes_that_can_hold_it(fields, size):
    assert size_for(WorkerSettings(gpus=1.0, **fields), NODES) == size


def test_ask_nodes_without_a_worker_on_gpus_asks_nobody(monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: pytest.fail("nodes were looked at"))
    assert ask_nodes(read_settings({}).with_gpus(0)) == {}


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * GB), ("1.5 GiB", 3 * 2**29), ("512mb", 512 * 10**6), ("4096", 4096)]
)
def test_memory_is_written_with_its_unit(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "80 apples", "GB", "-1GB"])
def test_plan_of_a_wrong_memory_names_it(text):
    with pytest.raises(ValueError, match=f"'{text}' is no amount of memory: 80GB"):
        parse_bytes(text)


def test_command_tells_the_plan_and_other_drafts_without_a_gpu(tmp_path, capsys):
    file = tmp_path / "outrider.yaml"
    file.write_text("target: {model: demo-small, replicas: 2, max_sequences: 32}\n")
    assert main(["plan", str(file), "--memory", "80GB", "--draft-memory", "24GB"]) == 0
    told = capsys.readouterr().out
    assert "A device with 80.00 GB has 1 x target" in told
    assert "\nsame seed, same text: exactly but for near-ties, in float32\n" in told
    assert "A device with 24.00 GB has 1 x draft" in told
    weights = dict(re.findall(r"^(\w+ \w+(?: in int4)?) +(\d+\.\d{3})", told, re.MULTILINE))
    assert float(weights["1B float32"]) == pytest.approx(3.926, rel=0.01)
    assert float(weights["8B int4"]) < 0.2 * float(weights["8B float32"])
    assert "the target in int4" in weights


@pytest.mark.slow
def test_plan_gives_each_rank_and_draft_a_device_of_the_named_memory(tmp_path, capsys):
    file = tmp_path / "outrider.yaml"
    file.write_text(
        "target: {model: demo-small, tensor_parallel: 2, max_replicas: 3}\n"
        "drafts: {model: {dtype: bfloat16}}\n"
    )
    assert main(["plan", str(file), "target.dtype=bfloat16", "--memory", "80GB"]) == 0
    told = capsys.readouterr().out
    assert "over 2 devices" in told
    graphs = re.search(r"^graphs +(\S+) +(\S+)$", told, re.MULTILINE)
    assert graphs is not None
    assert all(float(number) > 0 for number in graphs.groups())  # the draft is on a GPU of its own
    assert told.count("A device with 80.00 GB has 1 x ") == 2


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere.yaml"], "config='nowhere.yaml'"),
        (["target.thread=2"], "target.threads is one"),
        (["--memory", "many"], "'many' is no amount"),
        (["--memory", "1GB"], "takes"),
    ],
    ids=str,
)
def test_command_says_what_is_wrong(arguments, named, capsys):
    assert main(["plan", "target=demo-small", *arguments]) == 1
    assert named in capsys.readouterr().err


def test_ranks_that_cannot_share_the_target_are_refused(tmp_path, capsys):
    file = tmp_path / "outrider.yaml"
    file.write_text("target: {model: demo-small, tensor_parallel: 3}\n")
    assert main(["plan", str(file), "--memory", "80GB"]) == 1
    assert "tensor_parallel=3" in capsys.readouterr().err


def test_plan_is_checked_before_a_start(monkeypatch, capsys):
    monkeypatch.setattr(application, "start_ray", lambda _: None)
    monkeypatch.setattr(Preflight, "find", lambda _, settings, **found: find(settings, **found))
    monkeypatch.setattr(application, "start_serve", lambda *_: pytest.fail("Serve was started"))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])
    with pytest.raises(ValueError, match=r"target\.cache_memory=.* would fit"):
        application.app({**SMALL, "target.cache_memory": "0.99"})
    assert capsys.readouterr().out.count("GB on each device") == 1


@pytest.mark.slow
def test_plan_tells_what_a_step_takes_on_accelerators_that_are_named(capsys):
    arguments = [
        "plan",
        "target=demo-small",
        "--memory",
        "80GB",
        "--draft-memory",
        "24GB",
        "--accelerator",
        "H100",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"Gflop of a token +0\.\d +0\.\d", printed)
    assert re.search(r"ms, target on H100 +plain +3 tokens", printed)
    assert re.search(r"acceptance that pays +plain +3 tokens.*\nsequences: 1 +0\.\d\d", printed)
    assert "of a mixture" not in printed
    assert "ms, draft on" not in printed


@pytest.mark.slow
def test_plan_tells_from_which_acceptance_on_drafts_pay_for_a_mixture(tmp_path, capsys):
    """A few sequences read ever more experts with each token; many read them all in a plain step."""
    config = Qwen3MoeConfig(
        **{"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **{"vocab_size": 151936, "max_position_embeddings": 4096, "dtype": "bfloat16"},
    )
    config.save_pretrained(tmp_path)
    assert main(["plan", f"target={tmp_path}", "--memory", "80GB", "--accelerator", "H100"]) == 0
    printed = capsys.readouterr().out
    one, five = re.findall(r"GB (?:of weights read|for five tokens) +(\d\.\d+)", printed)
    assert float(five) > 1.5 * float(one)
    _, rates = printed.split("acceptance that pays")
    alone, _, many = map(float, re.findall(r"sequences: \d+ +\S+ +(\S+)", rates))  # Drafts of four tokens
    assert alone > 0.4 > many
    assert "of a mixture" in printed


def test_plan_as_json_has_bytes_and_steps_of_each_part(capsys):
    assert main(["plan", "target=demo-small", "--memory", "80GB", "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"][:1]
    assert device["memory_bytes"] == 80 * 10**9
    parts = device["parts"]
    assert parts[0]["role"] == "target"
    assert device["left_bytes"] == 80 * 10**9 - sum(
        part["bytes"]["total"] * part["per_device"] for part in parts
    )
    assert parts[0]["step"]["weight_bytes_read"] > 0
    assert parts[0]["sequences_by_context"][str(parts[0]["context_length"])] > 0


def test_accelerator_that_no_data_sheet_is_known_of_is_refused_by_name(capsys):
    assert main(["plan", "target=demo-small", "--memory", "80GB", "--accelerator", "Z80"]) == 1
    assert "accelerator 'Z80' is not known: give one of A10G, A100" in capsys.readouterr().err
