"""Token streams and the windows that training reads."""

import pytest
import torch

from outrider.demo.batches import Stream, make_stream, mixed_batch
from outrider.demo.tokenizer import END_OF_TEXT, train_tokenizer


def counting_stream(documents: int, length: int) -> Stream:
    return Stream(torch.arange(documents * length), torch.arange(documents) * length)


def test_documents_are_closed_by_the_end_of_text_token() -> None:
    tokenizer = train_tokenizer(["one two", "three"])
    stream = make_stream(tokenizer, ["one two", "three"])
    ends = (stream.tokens == END_OF_TEXT).nonzero().flatten().tolist()
    assert stream.starts.tolist() == [0, ends[0] + 1]
    assert ends[-1] == len(stream.tokens) - 1
    assert tokenizer.decode(stream.tokens[: ends[0]].tolist()) == "one two"


def test_every_other_window_starts_a_document() -> None:
    stream = counting_stream(documents=50, length=10)
    windows = stream.windows(200, 7, torch.Generator().manual_seed(0))
    first, last = windows[:, 0], windows[:, -1]
    assert (last - first == 6).all()
    assert (first[::2] % 10 == 0).all()
    assert len(set((first[1::2] % 10).tolist())) == 10


def test_windows_near_the_end_stay_inside() -> None:
    stream = counting_stream(documents=2, length=10)
    windows = stream.windows(100, 15, torch.Generator().manual_seed(0))
    assert windows.shape == (100, 15)
    assert windows.max() == 19


def test_a_mixed_batch_holds_every_kind_by_its_weight() -> None:
    weights = {"code": 6, "prose": 3, "json": 1}
    streams = {kind: Stream(torch.full((50,), i), torch.tensor([0])) for i, kind in enumerate(weights)}
    streams["stories"] = Stream(torch.full((50,), 9), torch.tensor([0]))  # without a weight
    batch = mixed_batch(streams, weights, 2000, 8, torch.Generator().manual_seed(0))
    assert batch.shape == (2000, 8)
    shares = batch[:, 0].bincount() / 2000
    assert shares.tolist() == pytest.approx([0.6, 0.3, 0.1], abs=0.05)
