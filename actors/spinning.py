"""Limits how long waiting threads of torch spin."""

from collections.abc import MutableMapping

SPINS = "GOMP_SPINCOUNT"  # environment variable of torch's OpenMP
# Spins of a waiting thread before it sleeps, about 0.1 ms: longer than the computation between two matrix
# products. By default a thread spins for 7 ms, and keeps other threads from its core.
FEW_SPINS = 5000


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Makes waiting threads of a process with this environment sleep soon; called before torch is imported.

    A value that is already set is kept.
    """
    environment.setdefault(SPINS, str(FEW_SPINS))
