"""Numbers of the routing that no user sets, in one table.

Each was chosen, and none was found by a sweep. ``tests/gateway/routing`` pins them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutingTuning:
    """The unit comes first in each comment."""

    # Choice of the drafter
    decided_for_s: float = 0.5  # seconds that a decision holds
    known_guesses: float = 24.0  # guesses; with fewer, what is assumed about a drafter weighs too much
    least_left: int = 64  # tokens that are left to generate if another drafter takes over
    small_lag: int = 32  # tokens that a drafter may be behind and still be asked for Drafts
    most_kinds: int = 4096  # pairs of task and drafter that are remembered: labels come from clients
    most_tasks: int = 1024  # pairs of task and drafter for which the pace knows acceptance

    # Roll-out of a new draft
    shares: tuple[float, ...] = (0.0, 0.125, 0.25, 0.5, 1.0)  # shares of the sequences, step by step
    drafts: int = 48  # Drafts that have to be judged before the share grows
    doublings: int = 4  # doublings of that number at most, one for each time that the draft went back


TUNING = RoutingTuning()
