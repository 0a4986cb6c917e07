"""What the transfer module needs of an agent that moves bytes one-sidedly.

One thread calls it (the endpoint's); no call blocks for long and none has a timeout of its own:
deadlines are the caller's. A handle that was posted may still write until `poll` says DONE.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankProcess
from pdtransfer.errors import AgentError

Descriptors = npt.NDArray[np.uint64]
"""(N, 3): address, bytes, device. Where it says so also NIXL's strided (N, 5): address, bytes, device,
stride, count (`lists`)."""
Indices = npt.NDArray[np.int32]
Operation = Literal["WRITE", "READ"]
DISCONNECT = "nixlRemoteDisconnectError"
"""Kind of failure after which nothing arrives before the peer is removed and added."""


class HandleState(StrEnum):
    """State of a posted transfer."""

    ACTIVE = "Active"
    DONE = "Done"
    """Every byte is in place at the target."""


class AgentFailure(AgentError):
    """One of NIXL's error classes, by name. `posted` is False when it is certain that nothing of
    the transfer was started, so that there is nothing to fence."""

    def __init__(self, kind: str, message: str, *, posted: bool) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.posted = posted


Registration = Any
Prepared = Any
Handle = Any


class AgentPort(Protocol):
    """A NIXL agent, or the shipped double. Every method may raise AgentFailure."""

    @property
    def name(self) -> str: ...
    @property
    def transports(self) -> tuple[str, ...]:
        """UCX_TLS as it holds for this agent, in words; empty when UCX may choose."""

    @property
    def plugins(self) -> tuple[str, ...]:
        """NIXL backends that are installed here, in order of their names; empty when that can not be told."""

    @property
    def process(self) -> RankProcess | None:
        """The process it lives in, if its death is the agent's."""

    def register(self, regions: Descriptors, kind: MemoryKind) -> Registration:
        """Register regions of one memory kind; they show in `metadata` from then on."""

    def deregister(self, registration: Registration) -> None: ...
    def metadata(self) -> bytes:
        """What a peer needs to reach this agent's memory."""

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata; returns its agent name. A name that is loaded is refused:
        remove it first (a new incarnation is a new peer)."""

    def remove_peer(self, name: str) -> None:
        """Forget a peer. No fence: what was posted may still land."""

    def connect(self, name: str) -> None:
        """Set up the connection now, so that the first transfer does not pay for it."""

    def prepare(self, peer: str | None, descriptors: Descriptors, kind: MemoryKind) -> Prepared:
        """Check and keep a descriptor list, (N, 3) or strided (N, 5). `peer` None: this agent's own
        memory, as local side; its own name: as the remote side of a loopback. A list may serve any
        number of transfers, many at once. `remove_peer` makes that peer's lists stale for ever, also
        when the peer is loaded again: posting with one raises."""

    def release_prepared(self, prepared: Prepared) -> None: ...
    def post(
        self,
        operation: Operation,
        local: Prepared,
        local_indices: Indices,
        remote: Prepared,
        remote_indices: Indices,
        notification: bytes = b"",
    ) -> Handle:
        """Start moving block local_indices[i] of `local` to (WRITE) or from (READ) block
        remote_indices[i] of `remote`; both have the same size. Runs of blocks that touch on both
        sides are moved as one, when on both sides the stride equals the size."""

    def poll(self, handle: Handle) -> HandleState:
        """Progress and look; raises AgentFailure when the transfer failed."""

    def release(self, handle: Handle) -> None:
        """Give a handle back. Only after DONE: releasing an active one does not stop it."""

    def progress(self) -> Sequence[tuple[str, bytes]]:
        """Let passive traffic go on (a target of TCP writes must); returns new notifications."""

    def notify(self, peer: str) -> None:
        """Send an empty-handed message to a peer: raises AgentFailure once the data path to it has ended
        (a peer that is only stopped, or cut off, gives no error). Never blocks."""

    def close(self) -> None:
        """Destroy the agent with all of its handles and lists: nothing that a peer posted to it lands from
        then on, if that transport needs the agent at all (`reach`). Any thread, when nothing else uses it;
        may block for seconds. Raises AgentFailure when it is not certain that it is gone."""
