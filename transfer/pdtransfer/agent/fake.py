"""A shipped in-process test double: agents of one hub move real bytes with memmove, with faults.

For tests without NIXL (races, faults, thousands of states in seconds). It is a double, not an
emulation of speed. Faults are counted per agent over its posts, the first post being 1 (see `FakeAgent.spares`).
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdtransfer.agent.lists import Blocks
from pdtransfer.agent.port import AgentFailure, Descriptors, HandleState, Indices, Operation
from pdtransfer.contract.base import MemoryKind


@dataclass
class Faults:
    """What goes wrong at one agent. Sets hold post numbers; `seen` records what really happened,
    so that a test can prove its fault."""

    fail_post: set[int] = field(default_factory=set)
    """post raises and nothing was started."""
    error: set[int] = field(default_factory=set)
    """poll raises; nothing of the transfer landed yet, and it may land late."""
    stall: set[int] = field(default_factory=set)
    """never completes until `FakeHub.unstall`."""
    stall_all: bool = False
    drop_notification: bool = False
    corrupt: bool = False
    """The first byte of every piece arrives flipped."""
    delay_polls: int = 1
    """Polls that find a transfer in flight: 1 as over sockets, 0 as over CMA, where the post copies."""
    seen: list[str] = field(default_factory=list)


@dataclass
class FakePrepared:
    """A checked descriptor list of `owner`'s memory: `local`, or of the peer as it was loaded then."""

    owner: str
    blocks: Blocks
    local: bool
    load: int = 0
    released: bool = False


@dataclass(eq=False)
class FakeHandle:
    """A posted transfer: what is to be copied, and when."""

    number: int
    """Of the post; 0 for one that was spared."""
    peer: str
    source: Descriptors
    destination: Descriptors
    polls_left: int
    stalled: bool = False
    broken: bool = False
    landed: bool = False
    released: bool = False
    notification: bytes = b""


class FakeHub:
    """The fabric: finds agents by name and copies between them. Safe to use from many threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.agents: dict[str, FakeAgent] = {}
        self.destroyed: set[str] = set()
        """Agents that were closed: no write lands there. (A process that died took its memory along.)"""

    def agent(self, name: str) -> FakeAgent:
        """A new agent on this hub."""
        with self.lock:
            made = FakeAgent(self, name)
            self.agents[name] = made
            return made

    def disconnect(self, name: str) -> None:
        """An agent vanishes as if its process died; its memory is left alone."""
        with self.lock:
            self.agents.pop(name).alive = False

    def unstall(self, name: str) -> int:
        """Let stalled and errored transfers of `name` land now (late writes); returns how many."""
        with self.lock:
            late = [h for h in self.agents[name].handles if (h.stalled or h.broken) and not h.landed]
            for handle in late:
                self.agents[name].land(handle)
                handle.stalled = False
            return len(late)


class FakeAgent:
    """`AgentPort` on a hub."""

    transports = ("fake",)
    """No transport that writes without the receiver: a destroyed agent receives nothing."""
    plugins: tuple[str, ...] = ()
    process = None

    def __init__(self, hub: FakeHub, name: str) -> None:
        self.hub = hub
        self.name = name
        self.alive = True
        self.faults = Faults()
        self.regions: list[tuple[MemoryKind, Descriptors]] = []
        self.peers: set[str] = set()
        self.connected: set[str] = set()
        self._loads: Counter[str] = Counter()
        """How often a peer was removed: lists made before are stale."""
        self.handles: list[FakeHandle] = []
        self.posts = 0
        self.inbox: list[tuple[str, bytes]] = []
        self.on_land: Callable[[FakeHandle], None] | None = None
        self.spares: Callable[[Descriptors], bool] | None = None
        """Posts (told by their local rows) that are not numbered and that no numbered or general stall, error or
        refusal concerns: probes come when they want, and a fault that was meant for a request must not hit them."""

    def register(self, regions: Descriptors, kind: MemoryKind) -> int:
        """Remember regions so that prepared lists can be checked against them."""
        with self.hub.lock:
            self.regions.append((kind, regions.copy()))
            return len(self.regions) - 1

    def deregister(self, registration: int) -> None:
        """Forget regions."""
        with self.hub.lock:
            kind, _ = self.regions[registration]
            self.regions[registration] = (kind, np.empty((0, 3), dtype=np.uint64))

    def metadata(self) -> bytes:
        """The agent's name; the hub knows the rest."""
        return json.dumps({"fake": self.name}).encode()

    def add_peer(self, metadata: bytes) -> str:
        """As NIXL: a name that is already loaded is refused."""
        try:
            name = str(json.loads(metadata)["fake"])
        except (ValueError, KeyError, TypeError) as error:
            raise AgentFailure("nixlInvalidParamError", "not an agent's metadata", posted=False) from error
        if name in self.peers:
            raise AgentFailure("nixlNotAllowedError", f"{name} is loaded", posted=False)
        if name in self.hub.destroyed:  # over TCP loading a peer connects to it
            raise AgentFailure("nixlBackendError", f"{name} is gone", posted=False)
        self.peers.add(name)
        return name

    def remove_peer(self, name: str) -> None:
        """Forget a peer."""
        if name not in self.peers:
            raise AgentFailure("nixlNotFoundError", name, posted=False)
        self.peers.discard(name)
        self.connected.discard(name)
        self._loads[name] += 1

    def connect(self, name: str) -> None:
        """Needs the peer to be there."""
        self._peer(name)
        self.connected.add(name)

    def _peer(self, name: str) -> FakeAgent:
        with self.hub.lock:
            if name not in self.peers:
                raise AgentFailure("nixlNotFoundError", name, posted=False)
            found = self.hub.agents.get(name)
            if found is None or not found.alive:
                raise AgentFailure("nixlRemoteDisconnectError", f"{name} is gone", posted=False)
            return found

    def prepare(self, peer: str | None, descriptors: Descriptors, kind: MemoryKind) -> FakePrepared:
        """Every row's blocks must lie within one registered region of that kind."""
        owner = self if peer in (None, self.name) else self._peer(str(peer))
        blocks = Blocks(descriptors)
        known = [r for k, r in owner.regions if k is kind and len(r)]
        if not known or not blocks.within(np.concatenate(known)):
            raise AgentFailure("nixlNotFoundError", f"{kind} blocks are not registered", posted=False)
        return FakePrepared(owner.name, blocks, peer is None, self._loads[owner.name])

    def release_prepared(self, prepared: FakePrepared) -> None:
        """Mark as released."""
        prepared.released = True

    def post(
        self,
        operation: Operation,
        local: FakePrepared,
        local_indices: Indices,
        remote: FakePrepared,
        remote_indices: Indices,
        notification: bytes = b"",
    ) -> FakeHandle:
        """Queue the copy; it lands at the poll that completes it."""
        if local.released or remote.released or not local.local or remote.local:
            raise AgentFailure("nixlInvalidParamError", "a list is released or of the wrong side", posted=False)
        if remote.load != self._loads[remote.owner]:
            raise AgentFailure("nixlNotFoundError", f"a list of {remote.owner} is stale", posted=False)
        mine, theirs = local.blocks.rows(local_indices), remote.blocks.rows(remote_indices)
        if len(mine) != len(theirs) or (mine[:, 1] != theirs[:, 1]).any():
            raise AgentFailure("nixlInvalidParamError", "the two sides differ in blocks or bytes", posted=False)
        with self.hub.lock:  # what is stalled is known to `unstall`, also when that comes at the same time
            return self._post(remote, mine, theirs, operation, notification)

    def _post(
        self, remote: FakePrepared, mine: Descriptors, theirs: Descriptors, operation: Operation, notification: bytes
    ) -> FakeHandle:
        number = 0
        if self.spares is None or not self.spares(mine):
            self.posts += 1
            number = self.posts
        if number in self.faults.fail_post:
            self.faults.seen.append(f"fail_post {number}")
            raise AgentFailure("nixlBackendError", "injected: the post failed", posted=False)
        source, destination = (mine, theirs) if operation == "WRITE" else (theirs, mine)
        handle = FakeHandle(
            number,
            remote.owner,
            source,
            destination,
            self.faults.delay_polls if number else 1,
            stalled=number > 0 and (self.faults.stall_all or number in self.faults.stall),
            broken=number in self.faults.error,
            notification=notification,
        )
        if handle.stalled:
            self.faults.seen.append(f"stall {number}")
        self.handles.append(handle)
        return handle

    def land(self, handle: FakeHandle) -> None:
        """Copy the bytes of a transfer into place, unless the receiving agent was destroyed."""
        if handle.peer in self.hub.destroyed:
            self.faults.seen.append(f"fenced {handle.number}")
            return
        for (src, size, _), (dst, _, _) in zip(handle.source.tolist(), handle.destination.tolist(), strict=True):
            ctypes.memmove(dst, src, size)
            if self.faults.corrupt:
                ctypes.memset(dst, ctypes.string_at(dst, 1)[0] ^ 0xFF, 1)
        if self.faults.corrupt:
            self.faults.seen.append(f"corrupt {handle.number}")
        handle.landed = True
        if self.on_land is not None:
            self.on_land(handle)

    def poll(self, handle: FakeHandle) -> HandleState:
        """Advance one transfer."""
        with self.hub.lock:
            if handle.landed:
                return HandleState.DONE
            if handle.peer != self.name and handle.peer not in self.hub.agents:
                raise AgentFailure("nixlRemoteDisconnectError", f"{handle.peer} is gone", posted=True)
            if handle.broken:
                self.faults.seen.append(f"error {handle.number}")
                raise AgentFailure("nixlBackendError", "injected: the transfer failed", posted=True)
            if handle.stalled:
                return HandleState.ACTIVE
            if handle.polls_left > 0:
                handle.polls_left -= 1
                return HandleState.ACTIVE
            self.land(handle)
            if handle.notification and not self.faults.drop_notification:
                self.hub.agents[handle.peer].inbox.append((self.name, handle.notification))
            return HandleState.DONE

    def release(self, handle: FakeHandle) -> None:
        """As NIXL: releasing an active handle does not stop it, so a late write stays possible."""
        handle.released = True

    def progress(self) -> Sequence[tuple[str, bytes]]:
        """New notifications."""
        with self.hub.lock:
            new, self.inbox = self.inbox, []
            return new

    def notify(self, peer: str) -> None:
        """Fails once the peer is gone."""
        self._peer(peer)

    def close(self) -> None:
        """Leave the hub; nothing lands here any more."""
        with self.hub.lock:
            self.alive = False
            self.hub.destroyed.add(self.name)
            self.hub.agents.pop(self.name, None)
