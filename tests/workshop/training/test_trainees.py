"""What is trained guesses as the engine will: the same logits, from the checkpoint that is written."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.drafters.dflash import DFlash
from outrider.engine.drafters.eagle3 import Eagle3
from outrider.engine.drafters.early_exit import EarlyExit
from outrider.engine.drafters.medusa import Medusa
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.parallel.drafter_step import DrafterStep
from tests.support.demo_pair import prompt_of
from tests.support.target_drafters import drafter_of, engine_with
from workshop.training.dflash import DFlashTrainee
from workshop.training.eagle3 import Eagle3Trainee
from workshop.training.early_exit import EarlyExitTrainee
from workshop.training.medusa import MedusaTrainee
from workshop.training.model import ModelTrainee
from workshop.training.parallel import ParallelTrainee
from workshop.training.settings import (
    DFlashSettings,
    Eagle3Settings,
    EarlyExitSettings,
    MedusaSettings,
    ModelTrainingSettings,
    ParallelSettings,
)
from workshop.training.target import FrozenTarget, Reading
from workshop.training.trainee import PositionGuess, Trainee

DEPTH, MASK = 3, 1
GIVEN: dict[str, Any] = {
    "target": DEMO / "target",
    "output": Path("unused"),
    "text": Path(__file__),
    "depth": DEPTH,
}
LAYERS = (1, 4, 6)
EXITS = (2, 4)


@cache
def target() -> FrozenTarget:
    return FrozenTarget(DEMO / "target")


def reading(trainee: Trainee) -> Reading:
    """Reads one text, without autocast's rounding."""
    tokens = torch.tensor([prompt_of("json")[:20]])
    output = target().model(input_ids=tokens, output_hidden_states=True)
    hidden = [output.hidden_states[layer] for layer in trainee.hidden_layers]
    return Reading(tokens, output.logits.softmax(-1), torch.stack(hidden, dim=2) if hidden else tokens)


def shaken(trainee: Trainee) -> Trainee:
    """Gives weights that are as good as trained for a comparison: none is 0 or 1."""
    torch.manual_seed(0)
    for weight in trainee.network.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
        weight.data = weight.data.bfloat16().float()  # as they are stored
    return trainee


def eagle3() -> Trainee:
    settings = Eagle3Settings(**GIVEN, layers=LAYERS, intermediate_size=96)
    return shaken(Eagle3Trainee(settings, target()))


def dflash() -> Trainee:
    settings = DFlashSettings(
        **GIVEN, layers=LAYERS, intermediate_size=96, mask_token=MASK, markov_rank=24, anchors=6
    )
    return shaken(DFlashTrainee(settings, target()))


def medusa() -> Trainee:
    return shaken(MedusaTrainee(MedusaSettings(**GIVEN), target()))


def early_exit() -> Trainee:
    return shaken(EarlyExitTrainee(EarlyExitSettings(**GIVEN, exits=EXITS), target()))


def parallel() -> Trainee:
    settings = ParallelSettings(**GIVEN, draft=DEMO / "draft", mask_token=MASK)
    return shaken(ParallelTrainee(settings, target()))


@torch.no_grad()
def guesses_of(trainee: Trainee) -> tuple[Reading, list[PositionGuess]]:
    read = reading(trainee)
    return read, list(trainee.guesses(read, DEPTH, None))


@torch.inference_mode()
def test_eagle3_head_guesses_as_it_drafts_in_the_engine(tmp_path: Path) -> None:
    trainee = eagle3()
    read, guesses = guesses_of(trainee)
    trainee.save(tmp_path)
    engine = engine_with("eagle3", tmp_path, self_check=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, Eagle3)
    assert drafter.hidden_layers == LAYERS
    start, tokens = 11, read.tokens[0].tolist()
    sequence = engine.open(len(tokens), 0, Sampling())
    assert engine._cache.reserve(sequence, len(tokens))
    tables = drafter._target.tables
    states = drafter._head.reduce(read.hidden[0, : start + 1])
    feed = Feed(tokens[1 : start + 2], 0, 0, sequence.blocks, None)
    states = drafter._pass(StepInput.of(tables, [feed]), states)[-1:]
    for position, guess in enumerate(guesses):
        if position:
            feed = Feed([tokens[start + position + 1]], 0, start + position, sequence.blocks, None)
            states = drafter._pass(StepInput.of(tables, [feed]), states)
        torch.testing.assert_close(drafter._logits(states), guess.logits[:, start], atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_dspark_draft_guesses_as_it_drafts_in_the_engine(tmp_path: Path) -> None:
    trainee = dflash()
    read, guesses = guesses_of(trainee)
    trainee.save(tmp_path)
    engine = engine_with("dflash", tmp_path, self_check=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, DFlash)
    assert drafter.hidden_layers == LAYERS
    anchor, tokens = 11, read.tokens[0].tolist()
    sequence = engine.open(len(tokens), 0, Sampling())
    assert engine._cache.reserve(sequence, len(tokens))
    context = Feed(tokens[:anchor], 0, 0, sequence.blocks, None)
    block = Feed([tokens[anchor]] + [MASK] * (DEPTH - 1), DEPTH, anchor, sequence.blocks, None)
    inputs = [StepInput.of(drafter._target.tables, [feed]) for feed in (context, block)]
    fed = drafter._reduced(read.hidden[0, :anchor])
    drafter._compute(DrafterStep(inputs[0], wants_logits=False), fed)
    states, logits = drafter._compute(DrafterStep(inputs[1]), fed[:0])
    # The token before each guess is the text's own.
    memory = states.new_zeros(1, drafter.memory_size)
    for position, guess in enumerate(guesses):
        (row,) = (guess.places == anchor + position).nonzero()
        of_row = states[position : position + 1], logits[position : position + 1]
        found, memory = drafter._after_tokens(*of_row, [tokens[anchor + position]], memory)
        torch.testing.assert_close(found[0], guess.logits[0, row][0], atol=1e-3, rtol=1e-3)


def test_dspark_draft_is_trained_from_a_few_anchors_that_have_text_before_them() -> None:
    trainee = dflash()
    read = reading(trainee)
    found = [*trainee.guesses(read, DEPTH, torch.Generator().manual_seed(0))]
    anchors = found[0].places
    assert len(anchors.unique()) == len(anchors) == 6
    assert anchors.min() >= 1
    assert anchors.max() + DEPTH < read.tokens.shape[1]  # each guess has the text's next token beside it
    assert all(torch.equal(guess.places, anchors + position) for position, guess in enumerate(found))
    assert [guess.continues_chain for guess in found] == [False, True, True]


def test_dspark_draft_learns_from_short_blocks_first_and_from_more_of_them() -> None:
    trainee = dflash()
    assert [trainee.depth(done, 8) for done in (0.0, 0.29, 0.3, 0.49, 0.5, 0.99)] == [1, 1, 3, 3, 8, 8]
    assert trainee.depth(0.4, 2) == 2
    read = reading(trainee)
    (found,) = trainee.guesses(read, 1, torch.Generator().manual_seed(0))
    assert len(found.places) == read.tokens.shape[1] - 2  # all places, which are fewer than three times six


@torch.inference_mode()
def test_shorter_block_guesses_as_the_beginning_of_a_longer_block() -> None:
    trainee = dflash()
    read = reading(trainee)
    short, long = ([*trainee.guesses(read, depth, None)] for depth in (2, DEPTH))
    for of_short, of_long in zip(short, long, strict=False):
        count = of_long.logits.shape[1]
        torch.testing.assert_close(of_short.logits[:, :count], of_long.logits, atol=1e-4, rtol=1e-4)


def test_mask_token_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="mask_token=2048 must be below 2048"):
        DFlashTrainee(DFlashSettings(**GIVEN, layers=LAYERS, mask_token=2048), target())


@torch.inference_mode()
def test_medusa_heads_guess_as_they_draft_in_the_engine(tmp_path: Path) -> None:
    trainee = medusa()
    read, guesses = guesses_of(trainee)
    trainee.save(tmp_path)
    engine = engine_with("medusa", tmp_path, self_check=False)
    drafter = drafter_of(engine)
    assert isinstance(drafter, Medusa)
    assert len(drafter._heads) == DEPTH
    for head, guess in zip(drafter._heads, guesses, strict=True):
        logits = head(read.hidden[0, : guess.logits.shape[1], 0])
        torch.testing.assert_close(logits, guess.logits[0], atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_exit_guesses_as_it_drafts_in_the_engine(tmp_path: Path) -> None:
    trainee = early_exit()
    read, guesses = guesses_of(trainee)
    trainee.save(tmp_path)
    for number, guess in zip(EXITS, guesses, strict=True):
        engine = engine_with("early_exit", tmp_path, {"layers": number}, self_check=False)
        drafter = drafter_of(engine)
        assert isinstance(drafter, EarlyExit)
        tokens = read.tokens[0].tolist()
        sequence = engine.open(len(tokens), 0, Sampling())
        assert engine._cache.reserve(sequence, len(tokens))
        feed = Feed(tokens, len(tokens), 0, sequence.blocks, None)
        logits, _ = drafter._pass(tuple(range(number)), [feed])
        torch.testing.assert_close(logits, guess.logits[0], atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_parallel_draft_guesses_as_an_ordinary_model_after_its_masks(tmp_path: Path) -> None:
    trainee = parallel()
    read, guesses = guesses_of(trainee)
    trainee.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.pard_token == MASK
    assert (tmp_path / "tokenizer.json").read_bytes() == (DEMO / "draft" / "tokenizer.json").read_bytes()
    start = 11
    tokens = torch.cat([read.tokens[:, : start + 1], torch.full((1, DEPTH - 1), MASK)], dim=1)
    logits = model(input_ids=tokens).logits[:, start:]
    for position, guess in enumerate(guesses):
        torch.testing.assert_close(logits[:, position], guess.logits[:, start], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("make", [eagle3, dflash, medusa, parallel])
def test_guess_is_compared_with_what_the_target_says_where_the_token_before_it_stands(
    make: Callable[[], Trainee],
) -> None:
    """A head's first guess is for the token after the target's own, a draft model's for that itself."""
    trainee = make()
    _, guesses = guesses_of(trainee)
    first = 0 if make is parallel else 1
    assert [guess.places[0].item() for guess in guesses] == [first, first + 1, first + 2]


@torch.inference_mode()
def test_draft_model_guesses_as_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    trainee = shaken(
        ModelTrainee(ModelTrainingSettings(**{**GIVEN, "depth": 1}, draft=DEMO / "draft"), target())
    )
    read, (guess,) = guesses_of(trainee)
    trainee.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(model(input_ids=read.tokens).logits, guess.logits, atol=1e-3, rtol=1e-3)
    assert guess.places.tolist() == list(range(read.tokens.shape[1]))
    assert (tmp_path / "tokenizer.json").read_bytes() == (DEMO / "draft" / "tokenizer.json").read_bytes()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's warning
def test_adapters_become_a_part_of_the_draft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    settings = ModelTrainingSettings(**{**GIVEN, "depth": 1}, draft=DEMO / "draft", lora=4)
    trainee = ModelTrainee(settings, target())
    plain = ModelTrainee(settings.model_copy(update={"lora": None}), target())
    assert 0 < trainee.size < 0.2 * plain.size
    for name, weight in trainee.network.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    (before,) = guesses_of(plain)[1]
    read, (guess,) = guesses_of(trainee)
    assert (guess.logits - before.logits).abs().max() > 0.5
    trainee.finalize()
    trainee.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {*model.state_dict()} == {*plain.network.state_dict()}
    with torch.no_grad():
        logits = model(input_ids=read.tokens).logits
    assert (logits - guess.logits).abs().mean() < 0.05 * (logits - before.logits).abs().mean()


def test_adapters_without_peft_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"lora=4 needs peft: pip install 'outrider\[workshop\]'"):
        ModelTrainee(ModelTrainingSettings(**{**GIVEN, "depth": 1}, draft=DEMO / "draft", lora=4), target())


def test_quantized_draft_is_refused(tmp_path: Path) -> None:
    config = json.loads((DEMO / "draft" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is quantized: name the checkpoint it was made from"):
        ModelTrainee(ModelTrainingSettings(**{**GIVEN, "depth": 1}, draft=tmp_path), target())


def test_deeper_positions_are_trained_on_fewer_chains() -> None:
    counts = {}
    for trainee in (eagle3(), parallel()):
        found = trainee.guesses(reading(trainee), DEPTH, torch.Generator().manual_seed(0))
        counts[trainee.title] = [guess.logits.shape[1] for guess in found]
    assert [*counts.values()] == [[13, 6, 6], [13, 9, 6]]  # counts for 16 tokens


def test_eagle3_head_learns_depth_after_depth() -> None:
    trainee = eagle3()
    assert [trainee.depth(done, 4) for done in (0.0, 0.29, 0.3, 0.49, 0.5, 0.99)] == [1, 1, 2, 2, 4, 4]
    assert trainee.depth(0.4, 1) == 1


def test_exits_begin_as_the_targets_own_norm_does_and_guess_the_next_token() -> None:
    trainee = EarlyExitTrainee(EarlyExitSettings(**GIVEN), target())
    assert trainee.hidden_layers == (1, 2, 3, 4, 5)
    assert trainee.labels(5)[0] == "after layer 1"
    state = torch.randn(3, 256)
    for exit_ in trainee.network.values():
        torch.testing.assert_close(exit_(state), target().model.model.norm(state))
    _, guesses = guesses_of(trainee)
    assert [guess.places[0].item() for guess in guesses] == [0] * 5


def test_exit_after_the_last_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exits=\[3, 6\] must be below 6"):
        EarlyExitTrainee(EarlyExitSettings(**GIVEN, exits=(3, 6)), target())


def test_draft_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mask_token=2048 must be below 2048"):
        ParallelTrainee(
            ParallelSettings(**GIVEN, draft=DEMO / "draft", mask_token=2048),
            target(),
        )
