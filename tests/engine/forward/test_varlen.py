"""The paged kernel and captured passes say what the ordinary way says.

Neither runs without CUDA: here the kernel is plain arithmetic with the same arguments, and a capture runs its
pass again. What is tested is all that surrounds them.
"""

import pytest
import torch

import outrider.engine.forward.forward_pass
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.engine import Engine

from outrider.engine.settings import EngineSettings
from outrider.engine.speculate import Request, generate
from tests.support.checkpoints import write_checkpoint

PROMPT_LENGTHS = (1, 5, 9, 30, 61)


class Kernel:
    """torch.nn.attention.varlen.varlen_attn with a block table, in plain arithmetic."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, query, keys, values, query_starts, key_starts, most_queries, longest, **options):
        assert key_starts is None
        assert options["num_splits"] == 1
        self.calls += 1
        repeats = query.shape[1] // keys.shape[2]
        assert options["enable_gqa"] == (repeats > 1)
        left, right = options["window_size"]
        assert right == 0
        output = torch.empty_like(query)
        for span, length in enumerate(options["seqused_k"].tolist()):
            start, end = query_starts[span : span + 2].tolist()
            assert end - start <= most_queries
            assert length <= longest
            blocks = options["block_table"][span].long()
            own_keys = keys[blocks].flatten(0, 1)[:length].repeat_interleave(repeats, 1)
            own_values = values[blocks].flatten(0, 1)[:length].repeat_interleave(repeats, 1)
            scale = query.shape[2] ** -0.5 if options["scale"] is None else options["scale"]
            scores = torch.einsum("qhd,khd->hqk", query[start:end], own_keys) * scale
            positions = torch.arange(length - (end - start), length)[:, None]
            slots = torch.arange(length)
            hidden = slots > positions
            if left >= 0:
                hidden |= slots < positions - left
            probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            output[start:end] = torch.einsum("hqk,khd->qhd", probs, own_values)
        return output


class Capture:
    """Runs the pass again into the same memory."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, forward):
        self.captured += 1
        logits, hidden = forward()

        def replay() -> None:
            self.replayed += 1
            logits.copy_(forward()[0])

        return replay, (logits, hidden)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(256, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS]
    sampling = Sampling(temperature=0.7, max_tokens=24)
    return [Request(prompt, sampling, key) for key, prompt in enumerate(prompts)]


class Guesses:
    """A drafter that knows the text, and errs at every fifth position."""

    def __init__(self, texts: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.texts = texts

    def propose(self, asked):
        drafts = []
        for one in asked:
            prompt = tuple(one.text.tokens[: one.text.prompt_length])
            done = len(one.text.tokens) - len(prompt)
            ahead = self.texts[prompt][done : done + one.depth]
            drafts.append(
                Draft.chain([t ^ 1 if (done + i) % 5 == 4 else t for i, t in enumerate(ahead)][:-1])
            )
        return drafts

    def forget(self, text):
        pass


@pytest.fixture(scope="module", params=["llama", "mistral"])
def checkpoint(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def engine_of(folder, **settings) -> Engine:
    return Engine.from_settings(
        EngineSettings(model=str(folder), block_size=8, cache_memory=2**22, prefill_chunk=16, **settings)
    )


def test_the_paged_way_says_the_same(checkpoint, monkeypatch):
    folder = checkpoint
    expected = [output.tokens for output in generate(engine_of(folder), None, requests(), 0)]
    kernel, capture = Kernel(), Capture()
    monkeypatch.setattr(outrider.engine.forward.forward_pass, "find_kernel", lambda *_: kernel)
    monkeypatch.setattr(outrider.engine.forward.forward_pass, "capture_cuda", capture)
    paged = engine_of(folder)
    assert [output.tokens for output in generate(paged, None, requests(), 0)] == expected
    texts = {request.prompt: tokens for request, tokens in zip(requests(), expected, strict=True)}
    outputs = generate(paged, Guesses(texts), requests(), 4)
    assert [output.tokens for output in outputs] == expected
    assert sum(output.accepted for output in outputs) > 40
    assert kernel.calls > 0
    assert capture.replayed > 3 * capture.captured > 0


def test_soft_capped_scores_are_not_the_kernel_s(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path, "gemma2")
    expected = [output.tokens for output in generate(engine_of(folder), None, requests(), 0)]
    kernel = Kernel()
    monkeypatch.setattr(outrider.engine.forward.forward_pass, "find_kernel", lambda *_: kernel)
    paged = engine_of(folder)
    assert [output.tokens for output in generate(paged, None, requests(), 0)] == expected
    assert kernel.calls == 0


def test_graphs_can_be_switched_off(checkpoint, monkeypatch):
    folder = checkpoint
    capture = Capture()
    monkeypatch.setattr(outrider.engine.forward.forward_pass, "find_kernel", lambda *_: Kernel())
    monkeypatch.setattr(outrider.engine.forward.forward_pass, "capture_cuda", capture)
    generate(engine_of(folder, graphs=False), None, requests(), 0)
    assert capture.captured == 0


def test_graphs_end_where_their_memory_does(checkpoint, monkeypatch):
    folder = checkpoint
    expected = [output.tokens for output in generate(engine_of(folder), None, requests(), 0)]
    capture = Capture()
    monkeypatch.setattr(outrider.engine.forward.forward_pass, "find_kernel", lambda *_: Kernel())
    monkeypatch.setattr(outrider.engine.forward.forward_pass, "capture_cuda", capture)
    monkeypatch.setattr("outrider.engine.forward.graphs.MOST_CAPTURED_TOKENS", 1)
    assert [output.tokens for output in generate(engine_of(folder), None, requests(), 0)] == expected
    assert capture.captured <= 1


def test_there_is_no_kernel_without_cuda():
    assert find_kernel({0: (2, 16, 16)}, 16, torch.bfloat16, torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("block_size", [16, 256])
def test_the_kernel_is_taken_only_where_it_is_right(block_size):
    """Whatever this device answers, asking must not fail."""
    find_kernel({0: (2, 64, 64)}, block_size, torch.bfloat16, torch.device("cuda"))
