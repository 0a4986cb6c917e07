"""What an engine rank sees of the transfer module: three small protocols and their errors.

An engine makes one `Endpoint` per rank over its KV pool, hands its card to the sidecar link and
feeds rosters back. A decode rank calls `receive`, a prefill rank `send`; both poll or wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.metrics import Samples
from pdtransfer.contract.nixl_plugins import DEFAULT
from pdtransfer.contract.verdict import Verdict


class TransferState(StrEnum):
    """Phase of one request on one rank. FAILED and SUCCESS are terminal."""

    WAITING = "Waiting"
    """Prefill: no decode asked yet. Decode: announced, no byte seen yet."""
    TRANSFERRING = "Transferring"
    SUCCESS = "Success"
    FAILED = "Failed"


class ReadyEvent(Protocol):
    """Awaited before a byte of a chunk is posted or packed."""

    def wait(self, timeout: float) -> bool:
        """Block until the chunk's bytes are in the pool; False after `timeout` seconds."""


@dataclass(frozen=True)
class Identity:
    """Names one attempt to move one request's KV. A retracted request keeps its room and gets a
    new attempt; both incarnations are checked by the receiver of every message."""

    room: int
    attempt: int
    source_incarnation: str
    destination_incarnation: str


@dataclass(frozen=True)
class Asked:
    """Who asked one prefill rank for one room so far: `ranks` of the `required` decode ranks of the engine
    `destination` (incarnation), in which attempt, and the first prompt page they want (what is before it they
    have) of a prompt of `tokens` tokens."""

    ranks: int
    required: int
    first_page: int
    tokens: int
    attempt: int
    destination: str

    @property
    def complete(self) -> bool:
        """Everyone has asked."""
        return self.ranks >= self.required


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Every state has its own deadline on both sides."""

    waiting: float = 30.0
    transfer: float = 60.0
    settle: float = 5.0
    connect: float = 10.0
    probe: float = 20.0
    quarantine: float = 60.0
    """Age of the oldest page or slot in quarantine at which a decode rank takes a new agent."""
    rotation: float = 120.0
    """How long transfers to the old agent may go on meanwhile; those that do not end by then fail."""


class Sender(Protocol):
    """Prefill side of one room on one rank."""

    @property
    def state(self) -> TransferState: ...
    @property
    def error(self) -> Exception | None: ...
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
        """Hand over finished pages. `pages` are pool page numbers of prompt pages `first_page ...`.

        Chunks may come in any order and overlap: each page of each layer goes once. `layers` (layer
        ids, step 1) says that only these layers are finished: prefill streams layer by layer; a chunk
        without it covers what is left of its pages, draft layers included. `pools` has the whole page
        list of another page space, once it is final (with every layer of it). `memory` says where the
        pages lie when a layer is registered in both kinds. May be called before any decode rank
        asked; never blocks."""

    def finish(self, metadata: bytes) -> None:
        """No more chunks. `metadata` (first token, logprobs ...) reaches decode after all bytes."""

    def abort(self, reason: str) -> None:
        """Give up; the decode side fails with `Aborted` at once."""

    def wait(self, timeout: float) -> TransferState:
        """Block until terminal or `timeout` seconds; never longer than the deadlines."""


class Receiver(Protocol):
    """Decode side of one room on one rank (over all prefill ranks it takes KV from)."""

    @property
    def state(self) -> TransferState: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def metadata(self) -> bytes | None:
        """The prefill's metadata; never visible before every byte of the request is."""

    @property
    def pages_releasable(self) -> bool:
        """False while a late write may still land in the request's pages."""

    def abort(self, reason: str) -> None: ...
    def wait(self, timeout: float) -> TransferState: ...


class Endpoint(Protocol):
    """One rank's transfer module: owns the NIXL agent, the control channel and the peers."""

    @property
    def card(self) -> RankCard: ...
    def apply_peers(self, peers: Sequence[RankCard]) -> None:
        """The whole set of wired peers. Adds, replaces (new incarnation) and removes; returns at
        once, work goes on in the endpoint's own thread and shows in `verdicts`."""

    def probe(self, pod_uids: Sequence[str] = ()) -> None: ...
    @property
    def verdicts(self) -> tuple[Verdict, ...]: ...
    def on_change(self, callback: Callable[[], None]) -> None:
        """Called (from any thread) when verdicts or counters changed."""

    def receive(
        self,
        *,
        room: int,
        attempt: int,
        bootstrap: str,
        pages: Sequence[int],
        first_page: int = 0,
        tokens: int,
        memory: MemoryKind | None = None,
        pools: Mapping[str, Sequence[int]] | None = None,
        group: int | None = None,
    ) -> Receiver:
        """Ask for a room's KV into `pages`, which hold prompt pages `first_page ..` of `tokens` tokens.

        `memory` says where the pages lie when this rank registered a layer in both kinds; `pools` has
        the page list of each other page space (matched with prefill's by position); `group` is the
        data-parallel rank of prefill to ask, when it is not the room modulo their number."""

    def asked(self, room: int) -> Asked | None:
        """What decode ranks want of a room, opened or not; None while nobody asked."""

    def expect(self, room: int) -> None:
        """The engine will send this room: that it died before is over, decode may ask (again)."""

    def send(self, *, room: int, tokens: int) -> Sender: ...
    @property
    def inflight(self) -> int: ...
    @property
    def draining(self) -> bool:
        """True once it takes no new transfers. Final."""

    @property
    def failed(self) -> Exception | None:
        """Why the endpoint's thread ended, if it did so by itself; every transfer fails from then on."""

    @property
    def metrics(self) -> Samples:
        """Everything measured since the start (contract/metrics.py), a copy."""

    def drain(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class PoolRegion:
    """A region of the engine's pool to be registered: address in bytes, one page's size."""

    layer: int
    kind: str
    address: int
    item_bytes: int
    items: int
    memory: str = "DRAM"
    device: int = 0
    draft: bool = False
    pool: str = ""
    """Page space that `items` counts in; "" for the KV pages."""


@dataclass(frozen=True)
class EndpointConfig:
    """How a rank's endpoint is reachable and protected."""

    listen_host: str = "0.0.0.0"
    advertise_host: str = "127.0.0.1"
    control_port: int = 0
    tls_dir: str | None = None
    """Folder with ca.crt, tls.crt, tls.key, mutual TLS on the control channel. None: plain text,
    for tests on one machine only, logged loudly."""
    server_name: str = "pod.pdcluster.internal"
    net_devices: str | None = None
    nixl_plugin: str = DEFAULT
    """NIXL's backend under the transfer, of `contract.nixl_plugins`; both sides need the same one."""
    nixl_params: Mapping[str, str] = field(default_factory=dict)
    """Its parameters."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    window_bytes: int = 64 << 20
    window_ops: int = 16
    quarantine_cap: int | None = None
    """Bytes in quarantine at which a decode rank takes a new agent at once, and fails when that does not
    help. None: an eighth of the pool."""
    staging_bytes: int = 64 << 20
    """Registered memory beside the pool, for each memory kind of it: prefill packs in it, decode lends
    it to prefill ranks, slot by slot. 0: none, and unequal slices are written in place."""
    staging_slot_bytes: int = 8 << 20
    strategy: Literal["auto", "sliced", "staged", "merge", "split"] = "auto"
    """Decode side: how slices of unequal tensor parallelism travel. `auto` chooses by cost for each
    request; another one is used for every request, and refused by name where a pair can not use it."""
    digest: bool = False
    """Decode side: ask for a digest of each request's bytes, and compare it with a digest of what is in
    the pages before a request succeeds. Costs about a second per GB on both sides."""
