"""Writes that the API server refused: each backs off alone, so that one full quota does not make wiring slow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdoperator.api.conditions import Reason
from pdoperator.kube.observe import Problem

FIRST, MOST = 1.0, 60.0
"""Seconds between the second and third try, and at most. The second try comes with the next look."""
STATUS_WRITE = "write the status"


@dataclass(frozen=True)
class _Held:
    problem: Problem
    failures: int
    not_before: float


@dataclass
class Refused:
    """Refused writes of one PDCluster by what they do (`kube.execute.describe`). A new spec forgets them."""

    _held: dict[str, _Held] = field(default_factory=dict)
    _generation: int = -1

    def look(self, generation: int, wanted: Iterable[str], now: float) -> None:
        """A new decision: what it does not want any more is forgotten, but not that the namespace ends
        (which is why nothing is wanted then)."""
        if generation != self._generation:
            self._held.clear()
            self._generation = generation
        keep = {*wanted, STATUS_WRITE}
        self._held = {
            doing: held
            for doing, held in self._held.items()
            if doing in keep or (held.problem.reason == Reason.NAMESPACE_TERMINATING and now < held.not_before)
        }

    def due(self, doing: str, now: float) -> bool:
        """False while it waits for its next try."""
        held = self._held.get(doing)
        return held is None or now >= held.not_before

    def tried(self, doing: str, problem: Problem | None, now: float) -> None:
        """Remember how it went."""
        if problem is None:
            self._held.pop(doing, None)
            return
        failures = (self._held[doing].failures if doing in self._held else 0) + 1
        wait = 0.0 if failures == 1 else min(MOST, FIRST * 2.0 ** min(failures - 2, 30))
        if problem.reason == Reason.NAMESPACE_TERMINATING:
            wait = MOST / 2
        self._held[doing] = _Held(problem, failures, now + wait)

    @property
    def problem(self) -> Problem | None:
        """The first one that still stands in the way of pods and children."""
        return next((held.problem for held in self._held.values()), None)
