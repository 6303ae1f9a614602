"""Texts end to end, and the windows of them that training reads."""

import torch

from workshop.training.stream import Stream


def test_texts_are_joined_in_their_order() -> None:
    stream = Stream.of([[7, 8], [9], [4, 5, 6]])
    assert stream.tokens.tolist() == [7, 8, 9, 4, 5, 6]
    assert stream.starts.tolist() == [0, 2, 3]


def counting_stream(documents: int, length: int) -> Stream:
    return Stream(torch.arange(documents * length), torch.arange(documents) * length)


def test_windows_start_a_document_in_turn() -> None:
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
