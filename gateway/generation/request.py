"""Requests of both APIs, and the parts of their answers."""

from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Span

from gateway.events import VerdictReceived
from gateway.generation.form import Form
from gateway.generation.text import Piece
from gateway.loop.stats import Stats
from gateway.receipts import ReceiptIssuer
from gateway.sequence import GatewaySequence, Token
from gateway.settings import Priority, Speculation
from gateway.tenants.tenant import Claim
from outrider.decoding.settings import Sampling
from protos.generation_pb2 import TokenLogprobs

Prompt = str | tuple[int, ...]  # text, or token ids


@dataclass(frozen=True)
class Request:
    """Prompts, and how to answer them."""

    prompts: tuple[Prompt, ...]  # each is answered independently of the others
    sampling: Sampling
    stop: tuple[str, ...] = ()
    speculation: Speculation = field(default_factory=Speculation)
    model: str | None = None
    n: int = 1  # answers to each prompt
    truncate_prompt: int | None = None  # newest tokens of each prompt that are kept; -1: as many as fit
    shown: frozenset[str] = frozenset()  # special tokens that the answer's text shows
    shows_special: bool = False  # whether the text shows all special tokens
    keeps_stop: bool = False  # whether an answer's text includes the stop string that ended it
    scores_prompts: bool = False  # whether prompt tokens get log-probabilities, sampling.logprobs for each
    generates: bool = True  # False: only the prompts are scored
    task: str | None = None  # label under which acceptance is counted
    priority: Priority = "interactive"
    order: int = 0  # place among the caller's waiting requests of this priority; the lowest is first
    form: Form | None = None  # form of the answer
    ends: frozenset[int] = frozenset()  # ids of tokens that end a turn in the chat template
    continues_text: bool = True  # False: the answer is a separate text, as in a chat
    receipt: bool = False  # whether each answer comes with a receipt
    prediction: Prompt | None = None  # predicted answer; None: no prediction
    draft_from: str | None = None  # id of a stored answer that serves as the prediction


@dataclass(frozen=True)
class AnswerUsage:
    """Tokens and speculation of all answers together."""

    prompt_tokens: int
    completion_tokens: int
    speculation: Speculation  # as resolved from request and settings
    stats: Stats
    answers: int = 1
    accepted_prediction_tokens: int = 0  # predicted tokens that the answers contain
    rejected_prediction_tokens: int = 0  # predicted tokens that the answers do not contain
    cached_tokens: int = 0  # prompt tokens that were in the target's KV cache before the request


@dataclass(frozen=True)
class Chunk:
    """Next part of one answer."""

    choice: int  # index of the answer; answers to one prompt are adjacent
    tokens: tuple[Token, ...]
    pieces: tuple[Piece, ...]  # per token, whole characters only
    finish_reason: str | None = None  # "stop" or "length", on the choice's last chunk
    usage: AnswerUsage | None = None  # on the last chunk of all choices
    round: VerdictReceived | None = None  # round that the tokens come from; None: plain decoding
    scores: tuple[TokenLogprobs, ...] = ()  # log-probabilities of the prompt from its second token on
    stop: str | None = None  # stop string that ended the answer, on the choice's last chunk
    receipt: dict[str, Any] | None = None  # JSON of the receipt, on the choice's last chunk

    @property
    def texts(self) -> list[str]:
        """Text that each token adds."""
        return [piece.text for piece in self.pieces]

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True)
class Prepared:
    """A validated request with its sequences."""

    sequences: tuple[GatewaySequence, ...]  # one per answer; answers to one prompt are adjacent
    n: int  # answers to each prompt
    stop: tuple[str, ...]
    speculation: Speculation
    task: str | None
    claim: Claim  # claim to a permit
    continues_text: bool
    shown: frozenset[str]
    deadline: float  # in the event loop's time
    server_span: Span  # span of the request, recorded or not
    model: str  # name of the served model, or of its adapter
    fingerprint: str  # hash of version, target and numerics
    issuer: ReceiptIssuer | None = None  # None: the request wants no receipts
    keeps_stop: bool = False  # whether an answer's text includes the stop string that ended it

    @property
    def priority(self) -> Priority:
        """Priority with which the request is served."""
        return self.claim.priority

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return self.claim.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that the target had cached before the request.

        Several answers to one prompt share a cache, so the lowest number among them counts.
        """
        starts = range(0, len(self.sequences), self.n)
        return sum(
            min(sequence.cached_tokens for sequence in self.sequences[start : start + self.n])
            for start in starts
        )

    @property
    def seed(self) -> int:
        seed = self.sequences[0].sampling.seed
        assert seed is not None
        return seed
