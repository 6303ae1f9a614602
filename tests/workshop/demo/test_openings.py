"""Prompts to train drafters on."""

from random import Random

from workshop.demo.openings import LONGEST, SHORTEST, opening, openings

DOCUMENTS = ["word " * 300, "x = 1\n" * 200]


def test_opening_begins_a_document_and_ends_with_a_word() -> None:
    for text in openings(DOCUMENTS, 50, Random(1)):
        assert any(document.startswith(text) for document in DOCUMENTS)
        assert text == text.rstrip()
        assert SHORTEST - 8 <= len(text) <= LONGEST


def test_document_of_one_word_opens_with_all_of_it_that_fits() -> None:
    assert opening("y" * 1000, Random(1)) == "y" * len(opening("y" * 1000, Random(1)))
