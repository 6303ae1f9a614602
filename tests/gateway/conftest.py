import pytest

from tests.fakes.tokenizers import byte_tokenizer


@pytest.fixture
def tokenizer():
    return byte_tokenizer()
