"""Words of the page's race: its verdict, its reasons, and the requests that it offers to copy."""

import ast
import json
import shlex
import shutil
import subprocess
from typing import Any

import pytest

from gateway.api.page import FILES

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="NOT RUN: Debian's package nodejs is missing")
REQUEST = {
    "prompt": 'It\'s {"a": \n',
    "max_tokens": 9,
    "temperature": 0.7,
    "seed": 3,
    "speculation": {"mode": "auto", "report": True},
}
REPORT = {
    "target_passes": 6,
    "rounds": 5,
    "drafted": 20,
    "reached": 10,
    "accepted": 4,
    "late_drafts": 0,
    "lost_drafts": 0,
}
LOADING = {"drafters": {"eagle3": "a head"}, "workers": [{"no_drafts_because": {"eagle3": "it loads"}}]}
HEALTH = {"drafters": {"model": "a draft model"}, "workers": [{"no_drafts_because": {}}]}


def said(function: str, *arguments: Any) -> Any:
    """Returns what a function of race_result.js returns."""
    call = f"{function}({', '.join(map(json.dumps, arguments))})"
    source = f"{(FILES / 'race_result.js').read_text()}\nconsole.log(JSON.stringify({call}));"
    command = [str(NODE), "--input-type=module"]
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def side(text: str, *times: float) -> dict[str, Any]:
    return {"text": text, "times": times}


def why(health: dict[str, Any] = HEALTH, **report: int) -> str:
    told: str = said("whyNotFaster", {"completion_tokens": 10, "speculation": REPORT | report}, health)
    return told


def test_verdict_of_equal_texts_says_how_many_times_as_fast() -> None:
    result = said("verdict", side("abc", 0, 100, 200), side("abc", 50, 100, 150))
    assert (result["text"], result["isSame"]) == ("2.0 times as fast, same text", True)


def test_verdict_of_differing_texts_says_where_they_part() -> None:
    result = said("verdict", side("abc", 0, 100, 200), side("abd", 0, 100, 200))
    assert not result["isSame"]
    assert result["text"].startswith("THE TEXTS DIFFER. They part after 2 characters")
    assert 'with "c", speculation with "d"' in result["text"]


def test_verdict_of_a_text_that_ends_earlier_differs() -> None:
    assert not said("verdict", side("abc", 0, 1, 2), side("ab", 0, 1))["isSame"]


def test_verdict_of_one_token_compares_no_speeds() -> None:
    assert said("verdict", side("a", 0), side("a", 0))["text"] == "too short to compare speeds, same text"


@pytest.mark.parametrize(
    ("report", "health", "words"),
    [
        ({"lost_drafts": 1}, HEALTH, "was lost"),
        ({"rounds": 0}, HEALTH, "the pace chose depth 0"),
        ({"rounds": 0, "late_drafts": 1}, HEALTH, "was late"),
        ({"rounds": 0}, HEALTH | {"drafters": {}}, "has no drafter"),
        (
            {"rounds": 0},
            LOADING,
            "ready: it loads.",
        ),
        ({"target_passes": 14}, HEALTH, "depth 0 for 9 of 10 tokens"),
        ({}, HEALTH, "Acceptance was low: 4 of 10"),
        ({"accepted": 9}, HEALTH, "5 rounds of 4.0 drafted tokens"),
    ],
)
def test_why_not_faster_names_the_reason(report: dict[str, int], health: dict[str, Any], words: str) -> None:
    assert words in why(health, **report)


def test_curl_of_a_request_is_the_request_in_a_shell() -> None:
    words = shlex.split(said("asCurl", "http://here:8000/", REQUEST, False))
    assert words[:3] == ["curl", "-N", "http://here:8000/v1/completions"]
    assert json.loads(words[-1]) == REQUEST


def test_python_of_a_request_is_the_call_of_the_client() -> None:
    source = said("asPython", "http://here:8000/", REQUEST, "m", False)
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    (create,) = [call for call in calls if ast.unparse(call.func) == "client.completions.create"]
    (client,) = [call for call in calls if ast.unparse(call.func) == "openai.OpenAI"]
    given = {word.arg: ast.literal_eval(word.value) for word in create.keywords}
    assert given.pop("extra_body") == {"speculation": REQUEST["speculation"]}
    assert given == {"model": "m", **{name: REQUEST[name] for name in REQUEST if name != "speculation"}}
    assert ast.literal_eval(client.keywords[0].value) == "http://here:8000/v1"


@pytest.mark.parametrize("function", ["asCurl", "asPython"])
def test_copied_request_names_the_key_s_variable_if_keys_are_needed(function: str) -> None:
    model = ["m"] if function == "asPython" else []
    assert "OUTRIDER_API_KEY" in said(function, "http://here/", REQUEST, *model, True)
    assert "OUTRIDER_API_KEY" not in said(function, "http://here/", REQUEST, *model, False)
