"""Programs that agents are built with, each in an environment of its own."""

from pathlib import Path

import pytest

from tests.clients.program import run
from tests.clients.served import Served

pytestmark = pytest.mark.slow
LITELLM, LANGCHAIN, INSTRUCTOR, AGENTS = "1.110.2", "1.7.4", "1.17.0", "0.24.0"
PROGRAMS = {
    "litellm": ("litellm_client.py", "", (f"litellm=={LITELLM}",), LITELLM),
    "langchain": (
        "langchain_client.py",
        "",
        (f"langchain-openai=={LANGCHAIN}", "langchain-anthropic==1.7.10"),
        LANGCHAIN,
    ),
    "instructor": ("instructor_client.py", "/v1", (f"instructor=={INSTRUCTOR}",), INSTRUCTOR),
    "openai-agents": ("agents_client.py", "/v1", (f"openai-agents=={AGENTS}",), AGENTS),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_program_for_agents_works_in_all_its_uses(served: Served, name: str) -> None:
    file, path, requirements, version = PROGRAMS[name]
    uses = Path(__file__).with_name(file)
    printed = await run((name, *requirements), "python", uses, served.root + path)
    assert printed.strip().splitlines()[-1] == version
