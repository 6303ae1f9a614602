"""Turns the prompts of requests into token ids, within the limits."""

from gateway.generation.limits import Limits
from gateway.generation.request import Prompt
from gateway.generation.tokenization import Tokenization


class Prompts:
    """Tokenizes prompts. A text that is certainly too long is refused before its tokenization."""

    def __init__(self, tokenization: Tokenization, limits: Limits) -> None:
        self._tokenization = tokenization
        self._limits = limits

    async def checked(self, prompt: Prompt, max_tokens: int, truncate_prompt: int | None) -> tuple[int, ...]:
        """Returns the token ids of a prompt that leaves room for an answer of ``max_tokens``.

        truncate_prompt: as ``Request.truncate_prompt``.

        Raises:
            InvalidRequestError: the prompt is invalid; the error names the field.
            WorkerLostError: there is no target.
        """
        if isinstance(prompt, str):
            if truncate_prompt is None:
                self._limits.check_text("prompt", prompt)
            prompt = tuple((await self._tokenization.encode(prompt, add_special_tokens=True)).ids)
        prompt = self._limits.truncated(prompt, truncate_prompt, max_tokens)
        self._limits.check_lengths(len(prompt), max_tokens)
        self._limits.check_ids("prompt", prompt)
        return prompt

    async def of_chat(self, pieces: tuple[str, ...], *, may_be_long: bool = False) -> tuple[int, ...]:
        """Returns the token ids of a chat; no token spans two pieces.

        may_be_long: whether its length is not checked.

        Raises:
            InvalidRequestError: the chat is too long; the error names the field.
            WorkerLostError: there is no target.
        """
        if not may_be_long:
            self._limits.check_text("prompt", "".join(pieces))
        return tuple(await self._tokenization.encode_apart(pieces))
