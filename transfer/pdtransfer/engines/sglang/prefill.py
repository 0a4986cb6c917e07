"""Prefill's half of the manager: registers the rank with its card, hears introductions and notes of decode ranks,
and knows the senders by room."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import requests
import zmq
from sglang.srt.runtime_context import get_parallel

from pdtransfer.engines.sglang.messages import BadMessage, GiveUp, Introduce, Note, decode
from pdtransfer.engines.sglang.plugin import LAUNCH
from pdtransfer.engines.sglang.registry import FIELD
from pdtransfer.engines.sglang.threads import watched
from pdtransfer.engines.sglang.told import Told
from pdtransfer.errors import TransferError

if TYPE_CHECKING:
    from pdtransfer.engines.sglang.rank import Rank
    from pdtransfer.engines.sglang.sender import PdclusterKVSender

log = logging.getLogger(__name__)
POLL_MS = 500
REGISTER_TRIES, REGISTER_PAUSE_S, REGISTER_TIMEOUT_S = 5, 1.0, 5.0
REGISTER_DEADLINE_S = 300.0
"""After so long without a registration the rank is broken: no decode can find it."""
ADVANCE_S, REST_S = 0.005, 0.5
"""Between two looks at the senders of a later pipeline stage: at least, and while none waits for decode."""
STOCK_TAGS: tuple[bytes, ...] = (b"ABORT", b"ABORT_ACK", b"KV_STATUS")
"""What SGLang's common classes send; here the control channel says all of it."""


class PrefillPart:
    """Mixed into the manager. SGLang's attributes are those of CommonKVManager."""

    rank: Rank | None
    server_socket: Any
    is_dummy_cp_rank: bool = False
    pp_rank: int
    _ending: bool
    broken: Any
    _known: ClassVar[tuple[bytes, ...]] = STOCK_TAGS

    def _begin_prefill(self) -> None:
        self.rank = None
        self._ending = False
        self.senders: dict[int, PdclusterKVSender] = {}
        self.told = Told()
        self.unregistered = ""
        """Why decode ranks can not find this rank; empty once they can."""
        self._launch = ""
        self._senders_lock = threading.Lock()
        self._enlisted = threading.Event()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def _start_prefill(self) -> None:
        self._threads.append(watched("pdcluster-control", self._hear, self.broken))
        if self.pp_rank > 0:
            self._threads.append(watched("pdcluster-stage", self._advance, self.broken))

    def _stop_prefill(self) -> None:
        self._stop.set()
        self._enlisted.set()
        for thread in self._threads:
            thread.join(5.0)

    # --- registration -----------------------------------------------------------------------

    def register_to_bootstrap(self) -> None:
        """Open the endpoint, then register with its card. SGLang calls this at the end of its own start."""
        self._open()  # type: ignore[attr-defined]
        self._launch = _launch()
        super().register_to_bootstrap()  # type: ignore[misc]

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        """Register at once if the server is up, else go on trying: a prefill that gave up would never be found.
        Until then every room fails and says so."""
        assert self.rank is not None
        body = {**payload, FIELD: {"card": self.rank.card.model_dump(mode="json"), "launch": self._launch}}
        incarnation = self.rank.card.incarnation
        for n in range(REGISTER_TRIES):
            if n and self._stop.wait(REGISTER_PAUSE_S):
                return
            if self._register(url, body, incarnation):
                return
        log.error("%s: no decode finds it until it is; trying on", self.unregistered)
        self._threads.append(
            watched("pdcluster-register", lambda: self._keep_registering(url, body, incarnation), self.broken)
        )

    def _keep_registering(self, url: str, body: dict[str, Any], incarnation: str) -> None:
        until = time.monotonic() + REGISTER_DEADLINE_S
        while not self._stop.wait(REGISTER_PAUSE_S) and not self._register(url, body, incarnation):
            if time.monotonic() > until:
                self.broken(f"{self.unregistered} (for {REGISTER_DEADLINE_S:.0f} s)")
                return

    def _register(self, url: str, body: dict[str, Any], incarnation: str) -> bool:
        """Try once; True when there is no more to do."""
        if not self._is_still(incarnation):
            return True
        why = _put(url, body)
        if not self._is_still(incarnation):
            return True
        self.unregistered = f"prefill is not registered at {url}: {why}" if why else ""
        if why:
            log.warning("%s", self.unregistered)
        return not why

    def _is_still(self, incarnation: str) -> bool:
        """SGLang has not taken its pools away meanwhile; what comes after registers itself."""
        rank = self.rank
        return rank is not None and rank.card.incarnation == incarnation

    # --- what decode ranks tell -------------------------------------------------------------

    def _hear(self) -> None:
        poller = zmq.Poller()
        poller.register(self.server_socket, zmq.POLLIN)
        while not self._stop.is_set():
            if poller.poll(POLL_MS):
                self.hear(self.server_socket.recv_multipart())

    def hear(self, frames: Sequence[bytes]) -> None:
        """One message. What can not be read or used is dropped with a warning, whoever sent it."""
        try:
            message = decode(list(frames))
        except BadMessage as error:
            if not frames or frames[0] not in self._known:
                log.warning("a message on the rank's ZMQ port is dropped: %s", error)
            return
        try:
            self._take(message)
        except TransferError as error:
            log.warning("what a decode rank told is dropped: %s", error)
        except Exception:
            log.exception("what a decode rank told could not be used")

    def _take(self, message: Introduce | Note | GiveUp) -> None:
        rank = self.rank
        assert rank is not None
        if isinstance(message, Introduce):
            if message.card is not None:
                rank.introduce([message.card], whole=False)
            return
        if message.source != rank.card.incarnation:
            log.warning("room %d: %s is for incarnation %s", message.room, message.type, message.source)
            return
        self.told.hear(message)

    # --- senders ----------------------------------------------------------------------------

    def enlist(self, room: int, sender: PdclusterKVSender) -> None:
        """A sender begins; one before it in the same room is SGLang's no more."""
        with self._senders_lock:
            self.senders[room] = sender
        self._enlisted.set()

    def forget_room(self, room: int, sender: PdclusterKVSender) -> None:
        """A sender is over."""
        with self._senders_lock:
            if self.senders.get(room) is not sender:
                return
            del self.senders[room]
        self.told.end(room, sender.asker)

    def _advance(self) -> None:
        """SGLang asks only the first pipeline stage whether decode is ready; it sees the others' state in their
        tables. Here the others look by themselves."""
        while not self._stop.is_set():
            began = time.monotonic()
            with self._senders_lock:
                waiting = [sender for sender in self.senders.values() if sender.waits]
            for sender in waiting:
                sender.advance()
            if waiting:
                self._stop.wait(max(ADVANCE_S, 4 * (time.monotonic() - began)))
            else:
                self._enlisted.wait(REST_S)
                self._enlisted.clear()

    # --- SGLang's calls ---------------------------------------------------------------------

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """Hand over finished pages. Never blocks, never raises: what is wrong fails the room."""
        sender = self.senders.get(bootstrap_room)
        if sender is not None:
            sender.take(kv_indices, index_slice, is_last_chunk, aux_index, state_indices, wait_event, indices_event)


def _launch() -> str:
    """What the node with the bootstrap server calls this start of the engine, empty where it has no name."""
    mine, parallel = os.environ.get(LAUNCH, ""), get_parallel()
    return str(parallel.world_group.broadcast_object(mine, src=0)) if int(parallel.nnodes) > 1 else mine


def _put(url: str, body: dict[str, Any]) -> str:
    """Register; why not, where it was not taken."""
    try:
        answer = requests.put(url, json=body, timeout=REGISTER_TIMEOUT_S)
    except requests.RequestException as error:
        return str(error)[:500]
    return "" if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text[:200]}"
