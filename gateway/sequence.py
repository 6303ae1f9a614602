"""Sequence in the gateway: the authoritative copy, of which workers hold caches."""

from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from gateway.adapter import NO_ADAPTER, Adapter
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.drafters.past_answers import NOBODYS, Scope
from outrider.pace.step import Step
from protos.generation_pb2 import TokenLogprobs


class Origin(Enum):
    """Origin of a token."""

    ACCEPTED = "accepted"  # drafted, and confirmed by the target
    TARGET = "target"  # the target's own, after a Draft
    PLAIN = "plain"  # the target's own, without a Draft
    FORCED = "forced"  # the only token that the grammar left, confirmed by the target


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token."""

    id: int
    origin: Origin
    logprobs: TokenLogprobs | None = None  # None: the request did not ask for them


@dataclass(frozen=True, slots=True)
class VerdictDraft:
    """Draft of a target drafter, which came with a Verdict."""

    draft: Draft
    drafter: str
    step: Step | None  # step of the drafter's model for it; None: there is none
    is_of_host: bool  # the host of a GPU chose its tokens, position by position


@dataclass
class GatewaySequence:
    """Prompt, settings and committed tokens; all parts of the gateway share one object per sequence."""

    prompt: tuple[int, ...]  # token ids
    sampling: Sampling
    noise_key: int
    generated: list[int] = field(default_factory=list)  # committed token ids after the prompt
    finish_reason: str | None = None  # "stop" or "length"; None: not finished
    round: int = 0  # number of the newest turn; never reset
    epoch: int = 0  # number of the newest stream to a worker; never reset
    scope: Scope = NOBODYS  # caller and task whose past answers may be used for drafting
    number: int = field(default_factory=count(1).__next__)  # unique in this gateway
    is_scored: bool = False  # whether log-probabilities of the prompt's tokens are wanted
    scores: list[TokenLogprobs] = field(default_factory=list)  # prompt tokens from the second on
    generates: bool = True  # False: nothing is generated after the prompt
    adapter: Adapter = NO_ADAPTER
    prediction: tuple[int, ...] = ()  # token ids that the request predicts for the answer; empty: none
    past: list[tuple[int, ...]] = field(default_factory=list)  # past answers, from which its targets draft
    queued_s: float = 0.0  # seconds in the gateway's queue
    cached_tokens: int = 0  # prompt tokens that were in the KV cache of its first target
    served_by: list[str] = field(default_factory=list)  # addresses of its targets, the newest last
    draft: VerdictDraft | None = None  # Draft that came with the newest Verdict; None: taken, or none came

    def __len__(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def limit(self) -> int:
        """Length at which max_tokens ends the sequence, in tokens."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def is_coupled(self) -> bool:
        """Whether the text shows which guesses were correct: other rules may accept a wrong guess."""
        return self.sampling.verification == "coupled"

    @property
    def unscored(self) -> int:
        """Number of prompt tokens whose log-probabilities are still missing; the first token has none."""
        return len(self.prompt) - 1 - len(self.scores) if self.is_scored else 0

    def since(self, base: int) -> list[int]:
        """Returns the committed tokens from position ``base`` on."""
        generated_from = base - len(self.prompt)
        if generated_from >= 0:
            return self.generated[generated_from:]
        return [*self.prompt[base:], *self.generated]
