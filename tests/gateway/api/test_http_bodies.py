"""Random bodies over HTTP: no answer is a defect of the gateway."""

import asyncio
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.openai.chat import ChatRequest
from gateway.api.openai.completions import CompletionRequest
from tests.fakes.scripted import ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, client_of
from tests.support.patience import LIMIT_S

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "auto",
            "fixed",
            "off",
            "model",
            "ngram",
            "suffix",
            "coupled",
            "block",
            "user",
            "text",
            "x",
            "\ud800",
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys())
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "base"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
def test_http_random_body_is_never_a_defect(tokenizer, path, base):
    async def check(body):
        async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
            for fields in (body, {**base, **body}):
                content = json.dumps(fields)
                response = await client.post(
                    path, content=content, headers={"content-type": "application/json"}
                )
                assert response.status_code in (200, 400, 404), response.text
                if response.status_code != 200:
                    assert response.json()["error"]["param"]

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
    @given(bodies)
    def run(body):
        asyncio.run(check(body))

    run()


EXTREMES = [
    *(sign * 2**power for sign in (1, -1) for power in (0, 31, 32, 62, 63, 64, 2000)),
    *(0, 0.5, 1e308, math.inf, math.nan, True, "", "\ud800", "\0", [], {}),
    *([None], [-1], [2**63], ["\ud800"], [[]], {"\ud800": 1}, {"1": math.nan}, {str(2**63): 1}, {"role": 1}),
    *({"type": "text"}, [{"role": "user", "content": "\ud800"}], [{"type": "text", "text": "\ud800"}]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "base"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
async def test_http_extreme_value_is_never_a_defect(tokenizer, path, base):
    target, headers = ScriptedTarget(ANSWER), {"content-type": "application/json"}
    async with client_of(tokenizer, target, request_deadline_s=LIMIT_S) as client:
        for field in [*FIELDS, "\ud800", ""]:
            for value in EXTREMES:
                target.requests.clear()
                content = json.dumps({**base, field: value})
                response = await client.post(path, content=content, headers=headers)
                assert response.status_code in (200, 400, 404), (field, value, response.text)
                assert response.status_code == 200 or response.json()["error"]["param"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b"NaN",
    ],
    ids=lambda content: repr(content[:12]),
)
async def test_http_malformed_request_is_the_caller_s_error(client, content):
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ("body" if content != b'{"prompt": "x", "seed": ' else "seed")
