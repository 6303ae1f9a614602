"""Gateways and Serve's proxies killed under running streams: clients go on."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil  # type: ignore[import-untyped]
import pytest

from outrider.client.client import Client
from tests.support.machines import TOKENS, Machines
from tests.support.patience import START_S, wait_until
from tests.support.two_machines import gateways, proxies


def test_gateway_killed_under_a_stream_of_our_client(machines: Machines) -> None:
    goes_on_though_killed(machines, gateways)


@pytest.mark.slow  # to the client it is a gateway that was killed
def test_serve_s_proxies_killed_under_a_stream_of_our_client(machines: Machines) -> None:
    goes_on_though_killed(machines, proxies)


def goes_on_though_killed(machines: Machines, lost: Callable[[], list[psutil.Process]]) -> None:
    """An answer through our client, of which these are lost when it has come to its twentieth piece."""
    with Client(machines.grpc, patience_s=START_S) as client:
        settings: dict[str, Any] = {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0.8, "seed": 8}
        expected = "".join(piece.text for piece in client.generate("def add(", **settings))
        answer = client.generate("def add(", **settings)
        pieces = []
        for number, piece in enumerate(answer):
            pieces.append(piece)
            if number == 20:
                found = lost()
                assert found
                for process in found:
                    process.kill()
    assert "".join(piece.text for piece in pieces) == expected
    assert answer.repeats >= 1
    until_a_gateway_knows_its_workers(machines)


def until_a_gateway_knows_its_workers(machines: Machines) -> None:
    """A new gateway hears of them anew; Serve's proxy may know only the one that was lost."""

    def knows() -> bool:
        try:
            return len(machines.pids("target")) == 2 and len(machines.pids("draft")) == 1
        except (httpx.TransportError, KeyError, ValueError):
            return False

    wait_until(knows, START_S)


@pytest.mark.slow  # as with our client
def test_gateway_killed_under_the_example_of_the_docs(machines: Machines) -> None:
    page = Path(__file__).parents[3].joinpath("docs", "failures.md").read_text()
    [example] = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def pieces(" in block]
    namespace: dict[str, Any] = {}
    exec(example.replace('"outrider-demo"', '"outrider-demo-small"'), namespace)  # what these machines serve
    settings = {"max_tokens": TOKENS, "temperature": 0.8, "extra_body": {"min_tokens": TOKENS}, "seed": 9}
    with openai.OpenAI(base_url=f"{machines.http}/v1", api_key="none", max_retries=0) as client:
        expected = "".join(namespace["pieces"](client, "def add(", **settings))
        text = ""
        for number, piece in enumerate(namespace["pieces"](client, "def add(", **settings)):
            text += piece
            if number == 20:
                for gateway in gateways():
                    gateway.kill()
    assert text == expected
    until_a_gateway_knows_its_workers(machines)
