"""Token streams and the batches that training reads."""

import pytest
import torch

from workshop.demo.batches import make_stream, mixed_batch
from workshop.demo.tokenizer import END_OF_TEXT, train_tokenizer
from workshop.training.stream import Stream


def test_documents_are_closed_by_the_end_of_text_token() -> None:
    tokenizer = train_tokenizer(["one two", "three"])
    stream = make_stream(tokenizer, ["one two", "three"])
    ends = (stream.tokens == END_OF_TEXT).nonzero().flatten().tolist()
    assert stream.starts.tolist() == [0, ends[0] + 1]
    assert ends[-1] == len(stream.tokens) - 1
    assert tokenizer.decode(stream.tokens[: ends[0]].tolist()) == "one two"


def test_mixed_batch_holds_every_kind_by_its_weight() -> None:
    weights = {"code": 6, "prose": 3, "json": 1}
    streams = {kind: Stream(torch.full((50,), i), torch.tensor([0])) for i, kind in enumerate(weights)}
    streams["stories"] = Stream(torch.full((50,), 9), torch.tensor([0]))  # without a weight
    batch = mixed_batch(streams, weights, 2000, 8, torch.Generator().manual_seed(0))
    assert batch.shape == (2000, 8)
    shares = batch[:, 0].bincount() / 2000
    assert shares.tolist() == pytest.approx([0.6, 0.3, 0.1], abs=0.05)
