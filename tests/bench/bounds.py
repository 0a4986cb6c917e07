"""What copying alone would cost: the least time of a strategy on this machine. Pure."""

from __future__ import annotations

from shape import Setup

WIRE_COPIES = {"shm": (1, 0), "tcp": (1, 1)}
"""Copies by the source's and by the target's process: CMA's one copy is done by the writer; loopback TCP copies into
the kernel and out of it."""
STRATEGY_COPIES = {"direct": (0, 0), "sliced": (0, 0), "staged": (1, 1), "merge": (0, 1), "split": (1, 0)}
"""Pack at the source, scatter at the target."""


def copies(setup: Setup, strategy: str) -> tuple[int, int]:
    """Copies of every byte at the source and at the target."""
    wire, own = WIRE_COPIES[setup.transport], STRATEGY_COPIES[strategy]
    return wire[0] + own[0], wire[1] + own[1]


def copy_bound(setup: Setup, strategy: str, nbytes: int, memcpy_seconds: float, cores: int) -> float:
    """Seconds: the busiest process, or all copies spread over all cores, whichever is more. `memcpy_seconds` is one
    thread's for `nbytes`."""
    source, target = copies(setup, strategy)
    busiest = max(source / setup.prefill, target / setup.decode)
    return memcpy_seconds * max(busiest, (source + target) / cores)
