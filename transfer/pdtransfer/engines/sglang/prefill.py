"""Prefill's half of the manager: registers the rank with its card, hears introductions and notes of decode ranks,
and knows the senders by room."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import requests
import zmq

from pdtransfer.engines.sglang.messages import BadMessage, GiveUp, Introduce, Note, decode
from pdtransfer.engines.sglang.registry import FIELD
from pdtransfer.engines.sglang.threads import watched
from pdtransfer.errors import TransferError

if TYPE_CHECKING:
    from pdtransfer.engines.sglang.rank import Rank
    from pdtransfer.engines.sglang.sender import PdclusterKVSender

log = logging.getLogger(__name__)
POLL_MS = 500
MAX_NOTES = 65536
"""Rooms whose notes are kept for a request that may still come; the oldest is dropped first."""
REGISTER_TRIES, REGISTER_PAUSE_S, REGISTER_TIMEOUT_S = 5, 1.0, 5.0
STOCK_TAGS: tuple[bytes, ...] = (b"ABORT", b"ABORT_ACK", b"KV_STATUS")
"""What SGLang's common classes send; here the control channel says all of it."""


class PrefillPart:
    """Mixed into the manager. SGLang's attributes are those of CommonKVManager."""

    rank: Rank | None
    server_socket: Any
    is_dummy_cp_rank: bool = False
    _ending: bool
    broken: Any
    _known: ClassVar[tuple[bytes, ...]] = STOCK_TAGS

    def _begin_prefill(self) -> None:
        self.rank = None
        self._ending = False
        self.senders: dict[int, PdclusterKVSender] = {}
        self._notes: OrderedDict[int, Note] = OrderedDict()
        self._given_up: OrderedDict[int, GiveUp] = OrderedDict()
        self._told_lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def _start_prefill(self) -> None:
        self._threads.append(watched("pdcluster-control", self._hear, self.broken))

    def _stop_prefill(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5.0)

    # --- registration -----------------------------------------------------------------------

    def register_to_bootstrap(self) -> None:
        """Open the endpoint, then register with its card. SGLang calls this at the end of its own start."""
        self._open()  # type: ignore[attr-defined]
        super().register_to_bootstrap()  # type: ignore[misc]

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        """Register at once if the server is up, else go on trying: a prefill that gave up would never be found."""
        assert self.rank is not None
        body = {**payload, FIELD: {"card": self.rank.card.model_dump(mode="json")}}
        if self._register(url, body, REGISTER_TRIES):
            return
        log.error("prefill is not registered at %s yet: no decode finds it until it is; trying on", url)
        self._threads.append(watched("pdcluster-register", lambda: self._keep_registering(url, body), self.broken))

    def _keep_registering(self, url: str, body: dict[str, Any]) -> None:
        while not self._stop.wait(REGISTER_PAUSE_S) and not self._register(url, body, 1):
            pass

    def _register(self, url: str, body: dict[str, Any], tries: int) -> bool:
        for n in range(tries):
            if n and self._stop.wait(REGISTER_PAUSE_S):
                return False
            try:
                answer = requests.put(url, json=body, timeout=REGISTER_TIMEOUT_S)
            except requests.RequestException as error:
                log.warning("registration at %s failed: %s", url, error)
                continue
            if answer.status_code == 200:
                return True
            log.warning("registration at %s failed: HTTP %d: %s", url, answer.status_code, answer.text[:200])
        return False

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
        if message.source and message.source != rank.card.incarnation:
            log.warning("room %d: %s is for incarnation %s", message.room, message.type, message.source)
            return
        if isinstance(message, Note):
            self._keep(self._notes, message)
            return
        self._keep(self._given_up, message)

    def _keep(self, book: OrderedDict[int, Any], message: Note | GiveUp) -> None:
        with self._told_lock:
            book.pop(message.room, None)
            book[message.room] = message
            while len(book) > MAX_NOTES:
                book.popitem(last=False)

    def take_note(self, room: int) -> Note | None:
        """That this rank has nothing to send for a room, if a decode rank told so; told once: the next attempt
        of the room has a note of its own."""
        with self._told_lock:
            return self._notes.pop(room, None)

    def given_up(self, room: int) -> GiveUp | None:
        """What a decode rank gave up last in this room, if it did."""
        return self._given_up.get(room)

    def forget_room(self, room: int, sender: PdclusterKVSender) -> None:
        """A sender is over."""
        with self._told_lock:
            if self.senders.get(room) is sender:
                del self.senders[room]
                self._given_up.pop(room, None)

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
