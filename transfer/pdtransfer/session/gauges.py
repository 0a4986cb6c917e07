"""What is there now, written into the metrics once a second from the core's thread (nothing of it is
kept up to date elsewhere, so that it can't drift from what it counts)."""

from __future__ import annotations

from collections import Counter

from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session.core import Core
from pdtransfer.session.depot import Depot
from pdtransfer.session.destination import DestinationSide
from pdtransfer.session.source import SourceSide
from pdtransfer.session.wiring import Wiring

EVERY = 1.0
"""Seconds."""


class Gauges:
    """Runs in the core's thread."""

    def __init__(
        self, core: Core, wiring: Wiring, source: SourceSide, destination: DestinationSide, depot: Depot
    ) -> None:
        self._core = core
        self._wiring = wiring
        self._source = source
        self._destination = destination
        self._depot = depot
        self._next = 0.0
        self._transports: set[str] = set()
        core.ticks.append(self._tick)

    def _tick(self, now: float) -> None:
        if now >= self._next:
            self._next = now + EVERY
            self.measure()

    def measure(self) -> None:
        """Take every gauge."""
        gauge, mover = self._core.metrics.gauge, self._core.mover
        gauge("inflight", self._source.inflight + self._destination.inflight)
        gauge("queued_requests", self._source.queued + self._destination.queued)
        book = self._destination.intake.book
        gauge("quarantined_bytes", self._destination.quarantined_pages_bytes, kind="pages")
        gauge("quarantined_bytes", book.quarantined_bytes, kind="slots")
        decode = self._wiring.card.role is Role.DECODE  # it lends, prefill packs
        for state, count in (book.counts() if decode else self._depot.counts()).items():
            gauge("staging_slots", count, state=state)
        gauge("inflight_handles", mover.handles_in_flight)
        gauge("inflight_bytes", mover.bytes_in_flight)
        gauge("loading_peers", len(self._wiring.loader))
        gauge("emulated_vram", self._wiring.card.layout.emulated_vram)
        self._peers()

    def _peers(self) -> None:
        verdicts = self._wiring.verdicts
        states = Counter(v.state for v in verdicts)
        for state in VerdictState:
            self._core.metrics.gauge("peers", states[state], state=state.value)
        wired = Counter(v.transport or "Unknown" for v in verdicts if v.state is VerdictState.WIRED)
        self._transports |= set(wired)  # one that is gone is shown as zero
        for transport in self._transports:
            self._core.metrics.gauge("wired_peers", wired[transport], transport=transport)
