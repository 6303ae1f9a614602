from collections.abc import AsyncIterator

import pytest

from tests.clients.served import Served, demo_pair


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with demo_pair() as served:
        yield served
