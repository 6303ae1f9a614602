import pytest

from tests.fakes.scripted import ScriptedDraft, ScriptedTarget
from tests.support.http_calls import ANSWER, client_of


@pytest.fixture
async def client(tokenizer):
    """Client of a service with a target, and a draft whose guesses are wrong once."""
    async with client_of(tokenizer, ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[3])) as client:
        yield client
