"""What waits for a fence on a decode rank, and what is to be done about it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from pdtransfer.contract.card import RankCard
from pdtransfer.session.receives import Leg, Receive

Verdict = Literal["wait", "rotate", "overflow"]


@dataclass(frozen=True)
class Limits:
    """`cap` in bytes, ages in seconds: `grace` is what a living source may take to acknowledge, `age` what
    is too long."""

    cap: int
    grace: float
    age: float


@dataclass(frozen=True)
class Quarantine:
    """`nbytes` of pages and slots; monotonic seconds since when the oldest of it waits, and the oldest that a
    new agent would free (None: nothing)."""

    nbytes: int = 0
    since: float | None = None
    revocable_since: float | None = None

    def judge(self, now: float, limits: Limits, *, failed: bool) -> Verdict:
        """`failed`: the last rotation did."""
        over = self.nbytes > limits.cap
        if (
            over
            and self.since is not None
            and now - self.since > limits.age
            and (self.revocable_since is None or failed)
        ):
            return "overflow"
        if self.revocable_since is not None:
            waited = now - self.revocable_since
            if waited > (limits.grace if over else limits.age):
                return "rotate"
        return "wait"


def owed(receive: Receive) -> Iterable[Leg]:
    """Legs whose source may still write."""
    return (leg for leg in receive.legs.values() if leg.sent and not leg.settled)


def measure(settling: Iterable[Receive], nbytes: int, revocable: Callable[[RankCard], bool]) -> Quarantine:
    """`settling` are receives that failed with a leg that is not settled; `nbytes` is what they hold."""
    waiting = [(receive.failed_at, leg.card) for receive in settling for leg in owed(receive)]
    return Quarantine(
        nbytes,
        min((at for at, _ in waiting), default=None),
        min((at for at, card in waiting if revocable(card)), default=None),
    )
