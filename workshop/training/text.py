"""The text that is trained on: prompts, and what the target answers to them.

The file has a line of JSON for each text: ``{"prompt": 12, "tokens": [...]}``, the length of the prompt and
the tokens of both. Only token ids are kept: training computes the target's distributions anew.
"""

import json
import time
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from workshop.training.settings import AnswerTextSettings
from workshop.training.stream import Stream

HELD_OUT = 32  # one text in this many is held out


def read_prompts(file: Path, seed: int) -> list[str]:
    """Returns prompts of all kinds, in a random order.

    file: JSON, lists of prompts by kind.

    Raises:
        ValueError: it is something else.
    """
    kinds = json.loads(file.read_bytes())
    if not isinstance(kinds, dict) or not all(isinstance(prompts, list) for prompts in kinds.values()):
        raise ValueError(f'prompts={str(file)!r} must be JSON of this form: {{"kind": ["prompt", ...], ...}}')
    prompts = [prompt for of_kind in kinds.values() for prompt in of_kind]
    Random(seed).shuffle(prompts)
    return prompts


def write_text(settings: AnswerTextSettings) -> None:
    """Answers the prompts. Lines that the file has already belong to the first prompts, and stay.

    Raises:
        ValueError: the prompts are not in their form.
        EngineError: the target cannot be run.
    """
    prompts = read_prompts(settings.prompts, settings.seed)[: settings.count]
    tokenizer = Tokenizer.from_file(str(settings.target / "tokenizer.json"))
    requests = [
        _request(tokenizer.encode(prompt).ids, number, settings) for number, prompt in enumerate(prompts)
    ]
    done = _lines_of(settings.output)
    engine = Engine.from_settings(
        EngineSettings(model=str(settings.target), dtype=settings.dtype, max_sequences=settings.at_once)
    )
    started, written = time.monotonic(), 0
    with settings.output.open("a") as file:
        for first in range(done, len(requests), settings.at_once):
            asked = requests[first : first + settings.at_once]
            for request, output in zip(asked, generate(engine, None, asked, 0), strict=True):
                text = {"prompt": len(request.prompt), "tokens": [*request.prompt, *output.tokens]}
                file.write(json.dumps(text, separators=(",", ":")) + "\n")
                written += len(output.tokens)
            file.flush()
            speed = written / (time.monotonic() - started)
            print(f"text {first + len(asked)}/{len(requests)}  {speed:.0f} tokens/s", flush=True)


def _lines_of(file: Path) -> int:
    """Returns the number of whole lines, and removes a line that was cut off."""
    if not file.exists():
        return 0
    written = file.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    with file.open("r+b") as cut:
        cut.truncate(len(whole))
    return whole.count(b"\n")


def _request(prompt: list[int], number: int, settings: AnswerTextSettings) -> OfflineRequest:
    temperature = settings.temperatures[number % len(settings.temperatures)]
    sampling = Sampling(max_tokens=settings.tokens, temperature=temperature, seed=number)
    return OfflineRequest(tuple(prompt), sampling, noise_key(number, 0, tuple(prompt)))


def read_text(file: Path) -> tuple[Stream, Stream]:
    """Returns texts to train on, and held-out texts.

    Raises:
        ValueError: there are too few texts for both.
    """
    with file.open() as lines:
        texts = [json.loads(line)["tokens"] for line in lines]
    held_out, training = texts[::HELD_OUT], [text for i, text in enumerate(texts) if i % HELD_OUT]
    if not training:
        raise ValueError(f"text={str(file)!r} has {len(texts)} texts: give 2 at least")
    return Stream.of(training), Stream.of(held_out)
