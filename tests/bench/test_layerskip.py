"""A target that is trained to be left early: `python -m bench layerskip`."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import layerskip
from bench.drafting import asked_of, leaving_early
from bench.layerskip import TARGET, LeftEarly
from outrider.demo.prompts import prompts
from workshop.demo.pair import load_model
from workshop.demo.train import Phase

TOKENS = torch.arange(6, 46).reshape(2, 20)


def left_early(dropped: float, monkeypatch: pytest.MonkeyPatch) -> LeftEarly:
    monkeypatch.setattr(layerskip, "DROPPED", dropped)
    return LeftEarly(load_model(TARGET), torch.Generator().manual_seed(1))


def test_where_no_layer_is_dropped_the_last_loss_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = left_early(0.0, monkeypatch)
    _, losses = model.loss(TOKENS, step=0)
    with torch.autocast("cpu", torch.bfloat16):
        own = model.model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    assert losses[-1] == pytest.approx(own.item(), rel=0.02)


def test_the_last_layer_may_be_dropped_and_the_first_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = left_early(1.0, monkeypatch)
    model.loss(TOKENS, step=0)
    *_, before_last, last = model.states
    assert torch.equal(last, before_last)
    assert not torch.equal(model.states[0], model.model.model.embed_tokens(TOKENS[:, :-1]))


def test_exits_take_turns_and_the_last_layer_is_always_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = left_early(0.0, monkeypatch)
    (_, even), (_, odd) = (model.loss(TOKENS, step) for step in (0, 1))
    assert (len(even), len(odd)) == (4, 3)  # of six layers: three exits or two, and the last
    assert even[-1] == odd[-1] not in even[:-1] + odd[:-1]


@pytest.mark.slow
def test_what_it_writes_is_an_ordinary_checkpoint_whose_first_layers_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerskip, "CHARACTERS", 200_000)
    layerskip.train(tmp_path, Phase(60, 4, 128))
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert config.architectures == ["LlamaForCausalLM"]
    asked = asked_of(prompts("arithmetic", 4), 0.0, 32)
    before, after = (leaving_early(folder, 3, 1).tally(asked, 4) for folder in (TARGET, tmp_path))
    assert after.tokens_per_pass > 1.2 * before.tokens_per_pass
