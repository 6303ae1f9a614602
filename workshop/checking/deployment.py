"""Client of one deployment: OpenAI's completions over HTTP."""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from outrider.learning.backoff import Backoff
from workshop.checking.errors import CheckError, RefusedError
from workshop.checking.settings import Mode

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
BUSY = (429, 503)  # status codes after which a request is repeated
ATTEMPTS = 6
PAUSE = Backoff(0.5, 8.0)  # seconds between attempts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedText:
    """Generated or scored tokens, as strings of their deployment."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]  # [num_tokens] raw, nats; NaN for the first token of a scored text
    likeliest: tuple[Mapping[str, float], ...]  # [num_tokens] log-probabilities of other likely tokens
    finish_reason: str | None
    refusal: str | None = None  # message of a refusal instead of an answer


@dataclass(frozen=True)
class EvaluatedAnswer:
    """Generated answer with its usage counts."""

    text: str
    tokens: tuple[int, ...]
    target_passes: int
    accepted_predictions: int  # tokens of the prediction that are in the answer
    rejected_predictions: int  # tokens of the prediction that are not in the answer


class Deployment:
    """Sends requests to a deployment, and repeats them while it is busy."""

    def __init__(self, name: str, http: httpx.AsyncClient, speculation: Mode = "auto") -> None:
        """
        Args:
            name: name of the deployment in errors and in the report.
            http: client with the deployment's base URL.
            speculation: mode that requests ask for; for "auto" the field is left out.
        """
        self.name = name
        self.url = str(http.base_url).rstrip("/")
        self.model = ""
        self.mode = speculation
        self._http = http

    async def connect(self) -> None:
        """Asks for the model's name. Raises CheckError."""
        body = await self._asked("GET", MODELS)
        try:
            self.model = body["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise CheckError(f"{self.name} ({self.url}) names no model at {MODELS}") from error

    async def complete(self, prompt: str, **fields: Any) -> list[CheckedText]:
        """Returns the choices of a completion, in order. Raises CheckError."""
        body = await self._completed(prompt=prompt, **fields)
        try:
            return [_text(choice) for choice in sorted(body["choices"], key=lambda choice: choice["index"])]
        except (KeyError, TypeError) as error:
            raise CheckError(
                f"{self.name} ({self.url}) answers without log-probabilities: {error!r}"
            ) from error

    async def answer(self, **fields: Any) -> EvaluatedAnswer:
        """Returns an Outrider service's answer to a completion request. Raises CheckError."""
        body = await self._completed(return_token_ids=True, **fields)
        try:
            ((choice,), usage) = body["choices"], body["usage"]
            details = usage["completion_tokens_details"]
            return EvaluatedAnswer(
                choice["text"],
                tuple(choice["token_ids"]),
                usage["speculation"]["target_passes"],
                details["accepted_prediction_tokens"],
                details["rejected_prediction_tokens"],
            )
        except (KeyError, TypeError) as error:
            raise CheckError(f"{self.name} ({self.url}) answers as no Outrider does: {error!r}") from error

    async def _completed(self, **fields: Any) -> Any:
        mode = {} if self.mode == "auto" else {"mode": self.mode}
        speculation = {**fields.pop("speculation", {}), **mode}
        asked = {"model": self.model, **fields}
        if speculation:
            asked["speculation"] = speculation
        return await self._asked("POST", COMPLETIONS, json=asked)

    async def score(self, text: str) -> CheckedText:
        """Returns the log-probabilities of the text's own tokens. Raises CheckError."""
        (scored,) = await self.complete(text, max_tokens=0, echo=True, logprobs=0)
        return scored

    async def _asked(self, method: str, path: str, **content: Any) -> Any:
        for attempt in range(ATTEMPTS):
            try:
                response = await self._http.request(method, path, **content)
            except httpx.HTTPError as error:
                raise CheckError(
                    f"{self.name} ({self.url}) does not answer: {error or type(error).__name__}"
                ) from error
            logger.debug("%s %s at %s: %d", method, path, self.name, response.status_code)
            if response.status_code not in BUSY or attempt + 1 == ATTEMPTS:
                break
            await asyncio.sleep(PAUSE.after(attempt))
        if response.is_error:
            raise RefusedError(
                f"{self.name} ({self.url}) answers {response.status_code}: {_message(response)}"
            )
        try:
            return response.json()
        except ValueError as error:
            raise CheckError(f"{self.name} ({self.url}) answers {path} without valid JSON") from error


def _text(choice: Mapping[str, Any]) -> CheckedText:
    told = choice["logprobs"]
    return CheckedText(
        tokens=tuple(told["tokens"]),
        logprobs=tuple(math.nan if value is None else value for value in told["token_logprobs"]),
        likeliest=tuple(top or {} for top in told["top_logprobs"] or [None] * len(told["tokens"])),
        finish_reason=choice["finish_reason"],
    )


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
