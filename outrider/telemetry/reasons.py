"""Reasons that metrics, spans and messages name: for a depth, a drafter, a span's end, a failure."""

from enum import StrEnum


class DepthReason(StrEnum):
    """What decides the depth of a sequence's next Draft; ``meaning`` is its row in docs/metrics.md."""

    meaning: str

    def __new__(cls, text: str, meaning: str) -> "DepthReason":
        reason = str.__new__(cls, text)
        reason._value_, reason.meaning = text, meaning
        return reason

    MEASURED = "measured", "the pace, by measured costs and acceptance"
    THRESHOLDS = "thresholds", "the pace, by its fixed rules"
    TRIAL = "trial", "the pace, which tries what the other kind of step costs"
    FIXED = "fixed", "the request, which asks for this depth"
    OFF = "off", "the request, which asks for no Drafts; or there is no drafter"
    LATE = "late Draft", "a Draft that missed its deadline and is still awaited"
    LOST = "lost draft worker", "the loss of the draft worker, until another is found"
    EMPTY = (
        "empty Drafts",
        "the drafter, which had nothing to say several times in a row and is seldom asked",
    )
    LAST_TOKEN = "last token", "the end of the answer, which leaves no room for a Draft"


class RouteReason(StrEnum):
    """Why a drafter drafts a sequence."""

    NAMED = "named"  # the request, or the only one that the settings list
    FIRST = "first"  # the first that the settings list: too little is known of the others
    MEASURED = "measured"  # the fastest by measured costs and acceptance
    LOST = "lost draft worker"  # a substitute for a drafter whose worker was lost
    ROLLED_OUT = "rolled out"  # a new draft, given its share of the sequences
    WENT_BACK = "went back"  # a substitute for a new draft that is not faster


class SpanReason(StrEnum):
    """What besides a depth begins or ends the span of a round or of plain decoding."""

    FIRST_TOKEN = "first token"  # a round without a Draft: the drafter takes in the prompt meanwhile
    LOST_TARGET = "lost target worker"
    PLAIN = "plain"  # plain decoding is over
    ENDED = "ended"  # the sequence is finished or given up


class FailureReason(StrEnum):
    """Why a sequence failed."""

    ENGINE = "engine"  # the target's engine cannot go on with it
    LOST_TARGETS = "lost targets"  # max_losses targets were lost with it
