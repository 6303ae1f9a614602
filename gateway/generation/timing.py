"""Times of a request: its turn, its first token, its last."""

import asyncio
import time
from dataclasses import dataclass

CANCELLED = (asyncio.CancelledError, GeneratorExit)  # how an answer ends if its reader has left


@dataclass
class Timing:
    """Times of a request in seconds from its arrival; None: it did not get so far."""

    operation: str  # "text_completion" or "chat"
    arrived: float  # time.monotonic()
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    tokens: int = 0
    error: str | None = None  # class of the exception that ended it

    def admitted(self) -> None:
        self.queue_s = time.monotonic() - self.arrived

    def add(self, tokens: int) -> None:
        if self.first_token_s is None and tokens:
            self.first_token_s = time.monotonic() - self.arrived
        self.tokens += tokens

    def end(self) -> None:
        """Sets the end: the last token is there. How its chunk is read changes nothing."""
        if self.total_s is None:
            self.total_s = time.monotonic() - self.arrived

    @property
    def per_output_token_s(self) -> float | None:
        """Mean seconds per token after the first; None: unknown."""
        if self.error is not None or self.tokens < 2 or self.first_token_s is None or self.total_s is None:
            return None
        return (self.total_s - self.first_token_s) / (self.tokens - 1)
