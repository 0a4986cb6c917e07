"""What a condition tells its reader: status, reason and message."""

from __future__ import annotations

from domain_world import World

from pdoperator.domain.actions import Memory
from pdoperator.domain.decide import decide
from pdoperator.domain.observed import Observed

Told = tuple[str, str, str]


def told(w: World, kind: str) -> Told:
    """As the world's status has it."""
    c = w.condition(kind)
    return c["status"], c["reason"], c["message"]


def told_of(w: World, observed: Observed, kind: str, memory: Memory | None = None) -> Told:
    """As this very observation gives it."""
    status = decide(observed, w.memory if memory is None else memory, w.settings).status
    assert status is not None
    c = next(c for c in status["conditions"] if c["type"] == kind)
    return c["status"], c["reason"], c["message"]
