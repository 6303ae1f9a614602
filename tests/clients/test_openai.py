"""The official client, in an environment without anything else."""

from pathlib import Path

import pytest

from tests.clients.program import run
from tests.clients.served import Served

pytestmark = pytest.mark.slow
VERSION = "3.54.0"
OPENAI = ("openai", f"openai=={VERSION}")
USES = Path(__file__).with_name("openai_client.py")


async def test_openai_client_works_in_all_its_uses(served: Served) -> None:
    assert (await run(OPENAI, "python", USES, served.v1)).strip() == VERSION
