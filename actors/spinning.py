"""Bound on how long waiting threads of torch spin."""

from collections.abc import MutableMapping

SPINS = "GOMP_SPINCOUNT"  # variable of torch's OpenMP
# Turns of a waiting thread before it sleeps, some 0.1 ms: longer than a thread computes between two products.
# By default it waits for 7 ms, and keeps other threads from its core.
FEW_SPINS = 5000


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Makes waiting threads of a process with this environment sleep soon; called before torch is imported.

    A value that is set already stays.
    """
    environment.setdefault(SPINS, str(FEW_SPINS))
