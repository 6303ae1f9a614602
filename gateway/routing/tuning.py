"""Constants of the routing that no user sets, in one table.

All were chosen by hand, none by a sweep. ``tests/gateway/routing`` pins them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutingTuning:
    """Constants of the routing; each comment begins with the unit."""

    # Choice of the drafter
    decided_for_s: float = 0.5  # seconds that a decision holds
    known_guesses: float = 24.0  # guesses; with fewer, the prior about a drafter weighs too much
    least_left: int = 64  # tokens; with fewer left to generate, no other drafter takes over
    small_lag: int = 32  # tokens by which a drafter's KV cache may lag if it is asked for Drafts
    most_kinds: int = 4096  # entries of each table, which is bounded since labels come from clients
    most_tasks: int = 1024  # entries of the pace's table of acceptance, for the same reason

    # Roll-out of a new draft
    shares: tuple[float, ...] = (0.0, 0.125, 0.25, 0.5, 1.0)  # shares of the sequences, step by step
    drafts: int = 48  # Drafts that have to be judged before the share grows
    doublings: int = 4  # doublings of that number at most; it doubles each time the share returns to 0


TUNING = RoutingTuning()
