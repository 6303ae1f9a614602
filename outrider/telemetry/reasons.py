"""Reasons in metrics, spans and messages: of depths, choices of a drafter, spans and failures."""

from enum import StrEnum


class DepthReason(StrEnum):
    """Reason of the depth of a sequence's next Draft; ``meaning`` is its row in docs/metrics.md."""

    meaning: str

    def __new__(cls, text: str, meaning: str) -> "DepthReason":
        reason = str.__new__(cls, text)
        reason._value_, reason.meaning = text, meaning
        return reason

    MEASURED = "measured", "the pace, by measured costs and acceptance"
    THRESHOLDS = "thresholds", "the pace, by its fixed rules"
    TRIAL = "trial", "the pace, which measures the cost of rounds or of plain decoding"
    FIXED = "fixed", "the request, which asks for this depth"
    OFF = "off", "the request, which asks for no Drafts; or there is no drafter"
    LATE = "late Draft", "a Draft that missed its deadline and is still awaited"
    LOST = "lost draft worker", "the loss of the draft worker, until another is found"
    EMPTY = (
        "empty Drafts",
        "the drafter, which sent several empty Drafts in a row and is seldom asked",
    )
    LAST_TOKEN = "last token", "the end of the answer, which leaves no room for a Draft"


class RouteReason(StrEnum):
    """Reason why a drafter drafts a sequence."""

    NAMED = "named"  # the request or the settings name no other drafter
    FIRST = "first"  # the first drafter of the settings, because too little is measured
    MEASURED = "measured"  # the fastest drafter by measured costs and acceptance
    LOST = "lost draft worker"  # a substitute for a drafter whose worker was lost
    ROLLED_OUT = "rolled out"  # a new draft, which gets a share of the sequences
    WENT_BACK = "went back"  # a substitute for a new draft that is not faster


class SpanReason(StrEnum):
    """Reason, other than a depth, why the span of a round or of plain decoding begins or ends."""

    FIRST_TOKEN = "first token"  # a round without a Draft, while the drafter prefills the prompt
    LOST_TARGET = "lost target worker"
    PARKED = "parked"  # the request lost its permit for a while
    MOVED = "moved"  # the sequence goes on at another target
    PLAIN = "plain"  # plain decoding is over
    ENDED = "ended"  # the sequence is finished or was aborted


class MoveReason(StrEnum):
    """Reason why a sequence is opened at a second target while the first target still has it."""

    LATE = "late target"  # a reply takes longer than nearly all replies of that target
    DRAINED = "drained target"
    BUSIER = "busier target"  # another target has far fewer sequences
    FULL = "full cache"  # sequences wait for KV cache there, and another target has plenty


class FailureReason(StrEnum):
    """Reason why a sequence failed."""

    ENGINE = "engine"  # the target's engine cannot continue it
    LOST_TARGETS = "lost targets"  # max_losses targets were lost
