"""The objects an engine holds: one send or one receive, readable from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdtransfer.contract.base import MemoryKind
from pdtransfer.session import validate
from pdtransfer.session.api import ReadyEvent, TransferState

_TERMINAL = (TransferState.SUCCESS, TransferState.FAILED)


class StateCell:
    """State with its error, guarded; terminal states are final."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = TransferState.WAITING
        self._error: Exception | None = None

    @property
    def state(self) -> TransferState:
        """Current phase."""
        with self._changed:
            return self._state

    @property
    def error(self) -> Exception | None:
        """Why it failed."""
        with self._changed:
            return self._error

    def move(self, state: TransferState, error: Exception | None = None) -> bool:
        """Enter a state; False when a terminal one was reached before."""
        with self._changed:
            if self._state in _TERMINAL:
                return False
            self._state, self._error = state, error
            self._changed.notify_all()
            return True

    def wait(self, timeout: float) -> TransferState:
        """Block until terminal, at most `timeout` seconds."""
        until = time.monotonic() + timeout
        with self._changed:
            while self._state not in _TERMINAL:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._state


@dataclass(frozen=True)
class Chunk:
    """Finished pages of the prompt, in the pool once `ready` says so: of all layers, or of some; and
    whole page lists of other page spaces. `memory`: where they lie, when a layer is in both kinds."""

    pages: tuple[int, ...]
    first_page: int
    ready: ReadyEvent
    pools: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: range | None = None
    memory: MemoryKind | None = None


class SendTransfer:
    """`Sender`: queues what the engine hands over; the endpoint's thread does the rest."""

    def __init__(self, room: int, tokens: int, post: Callable[..., None]) -> None:
        self.room = room
        self.tokens = tokens
        self.cell = StateCell()
        self._post = post

    @property
    def state(self) -> TransferState:
        """Current phase."""
        return self.cell.state

    @property
    def error(self) -> Exception | None:
        """Why it failed."""
        return self.cell.error

    def chunk(
        self,
        pages: Sequence[int],
        first_page: int,
        ready: ReadyEvent,
        *,
        pools: Mapping[str, Sequence[int]] | None = None,
        layers: range | None = None,
        memory: MemoryKind | None = None,
    ) -> None:
        """Hand over finished pages. Raises BadInput, which names what makes no sense."""
        chunk = Chunk(
            validate.pages("pages", pages, room=self.room),
            validate.whole("first_page", first_page, 0, 1 << 40, room=self.room),
            validate.ready("ready", ready, room=self.room),
            validate.pools("pools", pools, room=self.room),
            validate.layers("layers", layers, room=self.room),
            validate.memory("memory", memory, room=self.room),
        )
        self._post("chunk", self, chunk)

    def finish(self, metadata: bytes) -> None:
        """No more chunks."""
        self._post("finish", self, validate.metadata("metadata", metadata, room=self.room))

    def abort(self, reason: str) -> None:
        """Give up."""
        self._post("abort", self, str(reason))

    def wait(self, timeout: float) -> TransferState:
        """Block until terminal or `timeout` seconds."""
        return self.cell.wait(timeout)


class ReceiveTransfer:
    """`Receiver` over all prefill ranks of one room."""

    def __init__(self, room: int, attempt: int, abort: Callable[[str], None], releasable: Callable[[], bool]) -> None:
        self.room = room
        self.attempt = attempt
        self.cell = StateCell()
        self._abort = abort
        self._releasable = releasable
        self.received_metadata: bytes | None = None

    @property
    def state(self) -> TransferState:
        """Current phase."""
        return self.cell.state

    @property
    def error(self) -> Exception | None:
        """Why it failed."""
        return self.cell.error

    @property
    def metadata(self) -> bytes | None:
        """The prefill's metadata, once every byte is here."""
        return self.received_metadata if self.cell.state is TransferState.SUCCESS else None

    @property
    def pages_releasable(self) -> bool:
        """False while a late write may still land in the pages."""
        return self.cell.state in _TERMINAL and self._releasable()

    def abort(self, reason: str) -> None:
        """Give up."""
        self._abort(reason)

    def wait(self, timeout: float) -> TransferState:
        """Block until terminal or `timeout` seconds."""
        return self.cell.wait(timeout)
