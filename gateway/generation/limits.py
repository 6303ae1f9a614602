"""Limits of a request: texts, token ids and counts are checked before the request reaches a worker."""

from collections.abc import Collection

from tokenizers import Tokenizer

from gateway.errors import InvalidRequestError, TooLongError
from gateway.generation.tokenization import Tokenization
from gateway.settings import GatewaySettings
from gateway.workers.fleet import Fleet
from outrider.decoding.settings import Sampling

TOKEN_ID_FIELDS = ("logit_bias", "stop_token_ids", "allowed_token_ids", "bad_token_ids")


class Limits:
    """Limits by settings, tokenizer and targets. Each check raises InvalidRequestError, naming the field.

    Methods that need the context length raise WorkerLostError if there is no target.
    """

    def __init__(
        self, settings: GatewaySettings, tokenizer: Tokenizer, tokenization: Tokenization, fleet: Fleet
    ) -> None:
        self._settings = settings
        self._tokenization = tokenization
        self._fleet = fleet
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)

    def max_length(self) -> int:
        """Returns the context length that every target has, in tokens."""
        return min(worker.max_length for worker in self._fleet.targets())

    def room(self, prompt_tokens: int) -> int:
        """Returns the most tokens that an answer to such a prompt may have, at least 1."""
        context = self.max_length()
        return max(1, min(self._settings.max_output_tokens or context, context - prompt_tokens))

    def truncated(
        self, prompt: tuple[int, ...], truncate_prompt: int | None, max_tokens: int
    ) -> tuple[int, ...]:
        """Returns the newest tokens of a prompt, as many as ``Request.truncate_prompt`` asks for."""
        if truncate_prompt is None:
            return prompt
        fitting = max(min(self._longest_prompt(), self.max_length() - max_tokens), 1)
        return prompt[max(len(prompt) - (fitting if truncate_prompt < 0 else truncate_prompt), 0) :]

    def check_counts(self, prompts: int, n: int) -> None:
        """Checks the number of prompts, and the number of answers to each prompt."""
        most = self._settings.max_choices
        if not 1 <= n <= most:
            raise InvalidRequestError("n", f"{n} answers, 1 to {most} are accepted")
        if not 1 <= prompts * n <= most:
            raise InvalidRequestError(
                "prompt", f"{prompts} prompts with n={n}: 1 to {most} answers are accepted"
            )

    def check_sampling(self, sampling: Sampling) -> None:
        """Checks the token ids that the sampling settings name."""
        for name in TOKEN_ID_FIELDS:
            ids = getattr(sampling, name) or ()
            if len(ids) > self.vocab_size:
                raise InvalidRequestError(
                    name, f"{len(ids)} token ids, at most {self.vocab_size} are accepted"
                )
            self.check_ids(name, ids)
        if len({*sampling.bad_token_ids}) == self.vocab_size:
            raise InvalidRequestError(
                "bad_token_ids",
                f"all {self.vocab_size} token ids, at most {self.vocab_size - 1} are accepted",
            )

    def check_ids(self, field: str, token_ids: Collection[int]) -> None:
        """Checks that the tokenizer knows all token ids."""
        largest = max(token_ids, default=0)
        if largest >= self.vocab_size:
            raise InvalidRequestError(field, f"token id {largest} must be below {self.vocab_size}")

    def check_text(self, field: str, text: str) -> None:
        """Checks that a text is not too long for a prompt, however it is tokenized."""
        least, longest = self._tokenization.least_tokens(text), self._longest_prompt()
        if least > longest:
            raise self._too_long(field, f"{least} tokens or more, at most {longest} are accepted")

    def check_length(self, field: str, token_ids: Collection[int]) -> None:
        """Checks that the token ids fit into the context."""
        if len(token_ids) > (longest := self.max_length()):
            raise self._too_long(field, f"{len(token_ids)} token ids, at most {longest} are accepted")

    def check_lengths(self, prompt_tokens: int, max_tokens: int) -> None:
        """Checks the lengths of a prompt and of the answer to it."""
        if prompt_tokens == 0:
            raise InvalidRequestError("prompt", "must hold at least one token")
        longest_prompt = self._longest_prompt()
        if prompt_tokens > longest_prompt:
            raise self._too_long("prompt", f"{prompt_tokens} tokens, at most {longest_prompt} are accepted")
        longest_output = self.room(prompt_tokens)
        if max_tokens > longest_output:
            raise self._too_long(
                "max_tokens",
                f"{max_tokens} after {prompt_tokens} tokens of prompt, at most {longest_output} are accepted",
            )

    def _too_long(self, field: str, message: str) -> TooLongError:
        """Returns the error in the words by which clients recognize it: LiteLLM reads no error code."""
        context = f"this model's maximum context length is {self.max_length()} tokens"
        return TooLongError(field, f"{message}; {context}")

    def _longest_prompt(self) -> int:
        context = self.max_length()
        return min(self._settings.max_prompt_tokens or context, context - 1)
