"""How small a world is, what may go wrong in it, and what must never be."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdtransfer.session.api import Timeouts, TransferState

ROOMS = (7, 8, 9)
TERMINAL = (TransferState.SUCCESS, TransferState.FAILED)


class Violation(AssertionError):
    """Something that must never be."""


@dataclass(frozen=True)
class Bounds:
    """How small a world is, and how often what may go wrong."""

    prefill: int = 1
    decode: int = 1
    rooms: int = 1
    pages: int = 2
    """Of each room; a decode rank has twice as many in all."""
    attempts: int = 2
    sends: int = 2
    window: int = 2
    losses: int = 0
    doublings: int = 0
    errors: int = 0
    lates: int = 1
    aborts: int = 1
    prefill_aborts: int = 0
    breaks: int = 0
    kills: int = 0
    decode_kills: int = 0
    flips: int = 0
    """Rosters of prefill ranks that lose decode and get it back."""
    jumps: int = 0
    decode_of: int = 0
    """Ranks of the decode engine, of which `decode` are there (0: as many)."""
    strategy: str = "auto"
    slots: int = 0
    """Slots of one page in each rank's arena."""
    near: bool = False
    """All processes are of one PID namespace, where a death can be looked up."""
    timeouts: Timeouts = field(default_factory=Timeouts)
