"""The example of a client runs against a real service."""

import subprocess
import sys
from pathlib import Path

from tests.support.patience import LIMIT_S
from tests.support.running import Service

EXAMPLE = Path(__file__).parents[2] / "examples" / "client.py"


def test_client_example_against_a_service_finds_the_same_text_without_drafts(service: Service) -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLE, service.grpc], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert run.stdout.endswith("without drafts: the same text\n")
