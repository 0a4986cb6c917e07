"""Holds the sidecar's current state: applies pure transitions and hands their effects to the sockets.

Runs in one asyncio loop and is only touched from it, so a transition is never half applied.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from pdtransfer.contract.link import Failed, Heartbeat, Hello, RankMessage, Verdicts
from pdtransfer.contract.roster import RosterRefusal
from pdtransfer.sidecar import state as st
from pdtransfer.sidecar.model import Effect, HeldRoster, PodState
from pdtransfer.sidecar.store import StateFile

log = logging.getLogger(__name__)

EffectSink = Callable[[Sequence[Effect]], None]


class Hub:
    """Single owner of the state. `clock` is monotonic seconds."""

    def __init__(
        self, state: PodState, store: StateFile | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = state
        self.clock = clock
        self.tls_problem = ""
        """Why the control API can not be served, empty when it can."""
        self.tls_warning = ""
        """What is odd about the certificates while they still serve (newer ones are not used ...)."""
        self.tls_expires = 0.0
        """Unix time at which the served certificate ends, 0 without TLS."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """(metric, label) to count: refused ranks, refused rosters, TLS reloads ..."""
        self._store = store or StateFile(None)
        self._sink: EffectSink = lambda effects: None

    def connect(self, sink: EffectSink) -> None:
        """Name who carries out effects (the unix-socket side)."""
        self._sink = sink

    def message(self, conn: int, message: RankMessage) -> None:
        """One line of a rank."""
        now = self.clock()
        if isinstance(message, Heartbeat):
            self.state = st.heartbeat(self.state, conn, message, now)
        elif isinstance(message, Verdicts):
            self.state = st.verdicts(self.state, conn, message, now)
        elif isinstance(message, Failed):
            self._failed(conn, message, now)
        else:
            self._hello(conn, message, now)

    def _hello(self, conn: int, message: Hello, now: float) -> None:
        before = self.state
        self.state, effects = st.hello(before, conn, message, now)
        card = message.card
        if self.state.by_conn(conn) is None:
            self._log_refusal(card.rank)
        else:
            if self.state.incarnation != before.incarnation:
                log.info(
                    "new engine incarnation incarnation=%s before=%s",
                    self.state.incarnation,
                    before.incarnation or "(none)",
                )
            log.info(
                "rank registered rank=%d incarnation=%s agent=%s ranks=%d/%d%s",
                card.rank,
                card.incarnation,
                card.agent_name,
                len(self.state.ranks),
                self.state.expected_ranks,
                " emulated_vram=true" if card.layout.emulated_vram else "",
            )
        self._sink(effects)

    def _failed(self, conn: int, message: Failed, now: float) -> None:
        self.state, effects = st.failed(self.state, conn, message, now)
        if self.state.knows(conn):
            log.error("rank failed rank=%d incarnation=%s error=%r", message.rank, message.incarnation, message.message)
        else:
            self._log_refusal(message.rank)
        self._sink(effects)

    def refuse(self, conn: int, rank: int | None, reason: str, message: str) -> None:
        """Turn a connection away (its line could not be read, too many connections ...)."""
        self.state, effects = st.refuse(self.state, conn, rank, reason, message, self.clock())
        self.state = st.closed(self.state, conn)
        self._log_refusal(rank)
        self._sink(effects)

    def _log_refusal(self, rank: int | None) -> None:
        last = self.state.refused[-1]
        self.counts["refused_ranks", last.reason] += 1
        log.error("rank refused rank=%s reason=%s message=%r", rank, last.reason, last.message)

    def closed(self, conn: int) -> None:
        """The connection ended."""
        entry = self.state.by_conn(conn)
        if entry is not None:
            log.warning("rank gone rank=%d incarnation=%s", entry.rank, entry.card.incarnation)
        self.state = st.closed(self.state, conn)

    def put_roster(self, roster: HeldRoster, body: bytes | bytearray) -> RosterRefusal | None:
        """Take a roster and push each rank its part; or why it was not taken. `body` is what it
        was read from."""
        result = st.put_roster(self.state, roster)
        if isinstance(result, RosterRefusal):
            self.counts["refused_rosters", result.reason] += 1
            log.warning("roster refused reason=%s message=%r", result.reason, result.message)
            return result
        if result.changed:
            self.state = result.state
            log.info(
                "roster taken term=%d counter=%d hash=%s peers=%d",
                roster.key.term,
                roster.key.counter,
                roster.hash,
                len(roster.pairs),
            )
            self._store.save_roster(body)
            self._sink(result.effects)
        return None

    def drain(self) -> None:
        """No new transfers from now on."""
        fresh = not self.state.draining
        self.state, effects = st.drain(self.state)
        if fresh:
            log.info("draining ranks=%d", len(self.state.ranks))
            self._store.save_drain(self.state.identity)
        self._sink(effects)

    def probe(self, pod_uids: tuple[str, ...]) -> int:
        """Ask the ranks to probe; how many were asked."""
        self.state, effects = st.probe(self.state, pod_uids)
        self._sink(effects)
        return len(effects)
