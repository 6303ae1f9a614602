"""Adapters of a target: each row's change is PEFT's, and no row's change touches another row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, KINDS
from outrider.drafters.ngram import NgramIndex
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.sequence import NO_DRAFT
from outrider.engine.settings import EngineSettings
from outrider.engine.work import AskedAdapter, Decode, Decoded
from tests.support.adapters import merged, write_adapter
from tests.support.allocated import allocated_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.decoder_steps import BLOCK_SIZE, BLOCKS, OTHER, OTHERS, PROMPT
from tests.support.demo_pair import prompt_of
from tests.support.functions import needs_functions

ARCHITECTURES = ("llama", "qwen3", "qwen2_moe", "phi")  # the last has no fast decoder


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    given = {"block_size": BLOCK_SIZE, "cache_memory": 2**20, "threads": 1, "dtype": "float32", **fields}
    return EngineSettings.model_validate({"model": str(folder), **given})


def load(folder: Path, **fields: Any) -> ForwardPass:
    return load_forward_pass(settings_of(folder, **fields))


def logits(forward: ForwardPass, *steps: list[Feed]) -> torch.Tensor:
    with torch.inference_mode():
        fed = [StepInput.of(forward.tables, feeds) for feeds in steps]
        return torch.cat([forward.run(forward.prepare(step)).logits for step in fed])


def of_prompt(adapter: int, tokens: list[int] = PROMPT, blocks: Any = BLOCKS) -> Feed:
    return Feed([*tokens], len(tokens), 0, blocks, None, adapter)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("fields", [{"dtype": "float32"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("config", [{}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_adapter_computes_what_a_merged_model_computes(
    tmp_path: Path, kind: str, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    model = write_checkpoint(tmp_path / "model", kind)
    adapter = write_adapter(tmp_path / "adapter", model, 1, **config)
    forward = load(model, adapters={"a": str(adapter)}, **fields)
    found, plain = logits(forward, [of_prompt(1)]), logits(forward, [of_prompt(0)])
    expected = logits(load(merged(tmp_path / "merged", model, adapter), **fields), [of_prompt(0)])
    error = (found - expected).abs().amax(1)
    largest = error.max() if fields["dtype"] == "float32" else error.median()
    assert largest < (2e-4 if fields["dtype"] == "float32" else 0.1) * expected.abs().max()
    assert (plain - expected).abs().max() > 0.1 * expected.abs().max()  # else the adapter changes nothing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An adapter of all layers, and one of some layers with another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    few = write_adapter(folder / "few", model, 2, layers=("q_proj", "v_proj", "down_proj"), rank=8)
    return {"all": str(write_adapter(folder / "all", model, 1)), "few": str(few)}


@needs_functions
def test_rows_of_several_adapters_have_the_bits_that_they_have_alone(
    model: Path, two: dict[str, str]
) -> None:
    forward, short = load(model, adapters=two), OTHER
    alone = [logits(forward, [of_prompt(adapter)]) for adapter in (1, 2, 0)]
    beside = [of_prompt(other, short, OTHERS) for other in (2, 0, 1)]
    for adapter, bits, other in zip((1, 2, 0), alone, beside, strict=True):
        together = logits(forward, [other, of_prompt(adapter)])
        assert torch.equal(together[len(short) :], bits)
        one_by_one = [[Feed([token], 1, place, BLOCKS, None, adapter)] for place, token in enumerate(PROMPT)]
        assert torch.equal(logits(forward, *one_by_one), bits)
    assert torch.equal(alone[2], logits(load(model), [of_prompt(0)]))


def requests(adapters: tuple[str, ...]) -> list[OfflineRequest]:
    """A prompt that repeats itself for each adapter, so that n-grams find something, with some heat."""
    prompt = (5, 9, 33, 5, 9, 33, 5, 9)
    return [
        OfflineRequest(prompt, Sampling(max_tokens=24, temperature=heat, ignore_eos=True), number, adapter)
        for number, (adapter, heat) in enumerate(
            (AskedAdapter(name), heat) for name in adapters for heat in (0.0, 0.3)
        )
    ]


@needs_functions
def test_drafts_without_an_adapter_never_change_the_text_of_an_adapter(
    model: Path, two: dict[str, str]
) -> None:
    target, asked = Engine.from_settings(settings_of(model, adapters=two)), requests(("", "all", "few"))
    draft = DraftModel(Engine.from_settings(settings_of(model)))  # the target without its adapters
    alone = [generate(target, None, [request], 0)[0].tokens for request in asked]
    assert len({*alone}) == len(alone)
    for drafter, alternatives in ((IndexDrafter(NgramIndex), 0), (draft, 0), (draft, 3)):
        outputs = generate(target, drafter, asked, 3, alternatives)
        assert [output.tokens for output in outputs] == alone
    rates = [sum(output.accepted for output in outputs[first : first + 2]) for first in (0, 2, 4)]
    assert rates[0] > max(rates[1:]) > 0  # an adapter moves the text away from its draft


def fed(engine: Engine, prompt: tuple[int, ...], adapter: str) -> int:
    """Tokens of the prompt that are computed rather than found in the cache."""
    sequence, tokens = engine.open(len(prompt), 0, Sampling(max_tokens=1), adapter=AskedAdapter(adapter)), 0
    engine.submit(Decode(sequence.number, 0, prompt, NO_DRAFT, 1))
    while engine.has_work:
        assert all(isinstance(result, Decoded) for result in engine.step())
        assert engine.last_step is not None
        tokens += engine.last_step.tokens
    engine.close(sequence)
    return tokens


def test_prefix_is_found_by_sequences_of_its_adapter_alone(model: Path, two: dict[str, str]) -> None:
    engine, prompt = (
        Engine.from_settings(settings_of(model, adapters=two)),
        tuple(range(3, 3 + 3 * BLOCK_SIZE)),
    )
    for adapter in ("all", "few", ""):
        assert fed(engine, prompt, adapter) == len(prompt)
        assert fed(engine, prompt, adapter) == BLOCK_SIZE


def test_prefix_of_an_adapter_is_named_by_its_weights(
    model: Path, two: dict[str, str], tmp_path: Path
) -> None:
    other = {"all": str(write_adapter(tmp_path / "all", model, 7))}
    digests = [load(model, adapters=adapters).adapters.find("all").digest for adapters in (two, two, other)]
    assert digests[0] == digests[1] != digests[2]


def test_sequence_with_an_unknown_adapter_is_refused_by_name(model: Path, two: dict[str, str]) -> None:
    engine = Engine.from_settings(settings_of(model, adapters=two))
    with pytest.raises(ValueError, match="adapter='other' is not there: there are 'all', 'few'"):
        engine.open(3, 0, Sampling(), adapter=AskedAdapter("other"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA', and LORA alone is computed here"),
        ({"use_dora": True}, "use_dora=True is not computed here: False is"),
        ({"bias": "all"}, "bias='all' is not computed here: 'none' is"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not computed here"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2} is not computed here"),
        ({"init_lora_weights": "pissa_niter_4"}, "has changed the model's own weights"),
        ({"r": 5}, "does not fit r=5"),
    ],
    ids=str,
)
def test_adapter_that_is_not_computed_is_refused_before_weights_are_read(
    model: Path, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", model, 1)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(fields | config))
    nowhere = settings_of(tmp_path / "no model", adapters={"a": str(adapter)})
    with pytest.raises(UnsupportedModelError, match=rf"adapters\.a='.*adapter': .*{reason}"):
        load_forward_pass(nowhere)


def test_adapter_of_other_layers_or_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    head = write_adapter(tmp_path / "head", model, 1, layers=("lm_head",))
    with pytest.raises(UnsupportedModelError, match=r"it changes base_model\.model\.lm_head"):
        load(model, adapters={"a": str(head)})
    wide = write_checkpoint(tmp_path / "wide", "llama", intermediate_size=160)
    with pytest.raises(UnsupportedModelError, match=r"gate_proj is \[160, 64\] and must be \[128, 64\]"):
        load(model, adapters={"a": str(write_adapter(tmp_path / "a", wide, 1, layers=("gate_proj",)))})
    deep = write_checkpoint(tmp_path / "deep", "llama", num_hidden_layers=4)
    with pytest.raises(UnsupportedModelError, match=r"model.layers.3.* which LlamaForCausalLM does not have"):
        load(model, adapters={"a": str(write_adapter(tmp_path / "b", deep, 1))})


def test_weights_of_adapters_are_planned(model: Path, tmp_path: Path) -> None:
    adapters = {"a": str(write_adapter(tmp_path / "a", model, 1, rank=32))}
    planned, taken = (
        [size(adapters) - size({})]
        for size in (
            lambda named: skeleton(settings_of(model, adapters=named)).weight_bytes(),
            lambda named: allocated_weights(load(model, adapters=named).model),
        )
    )
    assert planned == taken


@pytest.mark.slow
@needs_functions
def test_acceptance_falls_as_an_adapter_moves_the_text_which_no_draft_does(tmp_path: Path) -> None:
    model, rates = DEMO / "target", []
    adapters = {
        f"{strength:g}": str(write_adapter(tmp_path / f"{strength:g}", model, 1, strength=strength))
        for strength in (0.2, 0.6, 1.2)
    }
    usual: dict[str, Any] = {"dtype": "float32", "threads": 1, "cache_memory": 2**26}
    target = Engine.from_settings(EngineSettings(model=str(model), adapters=adapters, **usual))
    draft = Engine.from_settings(EngineSettings(model=str(DEMO / "draft"), **usual))
    prompts = [(prompt_of(kind), heat) for kind in KINDS for heat in (0.0, 0.7)]
    for name in ("", *adapters):
        asked = [
            OfflineRequest(
                prompt, Sampling(max_tokens=48, temperature=heat, ignore_eos=True), 1, AskedAdapter(name)
            )
            for prompt, heat in prompts
        ]
        plain, drafted = generate(target, None, asked, 0), generate(target, DraftModel(draft), asked, 4)
        assert [output.tokens for output in drafted] == [output.tokens for output in plain]
        tokens, drafts = sum(output.accepted for output in drafted), sum(output.drafted for output in drafted)
        passes = sum(output.target_passes for output in drafted)
        print(f"{name or 'none'}: {tokens / drafts:.2f} accepted, {48 * len(asked) / passes:.2f} a pass")
        rates.append(tokens / drafts)
    assert rates[0] > 0.5
    assert rates == sorted(rates, reverse=True)
