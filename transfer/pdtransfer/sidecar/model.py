"""What a sidecar knows of its pod, as frozen data, and the effects a transition asks for. No logic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.link import SidecarMessage
from pdtransfer.contract.metrics import Samples
from pdtransfer.contract.roster import RosterKey
from pdtransfer.contract.verdict import Verdict

STALE_AFTER = 3.0
"""Seconds without a line from a rank until it counts as stale (six missed heartbeats)."""
REFUSED_FOR = 30.0
"""Seconds a refusal is reported after it last happened; a refused rank asks again every few seconds."""
KEEP_RETIRED = 32
KEEP_REFUSED = 16
ZERO = RosterKey(term=0, counter=0)


@dataclass(frozen=True)
class Identity:
    """The pod this sidecar speaks for."""

    cluster_uid: str
    pod_uid: str
    role: Role
    pod_name: str = ""
    revision: str = ""


@dataclass(frozen=True)
class RankEntry:
    """One registered rank. `conn` names its connection, `seen` is when its last line came (monotonic)."""

    conn: int
    card: RankCard
    seen: float
    inflight: int = 0
    metrics: Samples = field(default_factory=dict)
    bad_samples: int = 0
    """What of its last report could not be taken."""
    verdicts: tuple[Verdict, ...] = ()

    @property
    def rank(self) -> int:
        return self.card.rank


@dataclass(frozen=True)
class FailedEntry:
    """A rank that says that it failed, on a connection that is open."""

    conn: int
    rank: int
    incarnation: str
    message: str


@dataclass(frozen=True)
class Refused:
    """A rank that was turned away, and when last. `rank` is None when its line could not be read."""

    rank: int | None
    reason: str
    message: str
    at: float


@dataclass(frozen=True)
class PeerRef:
    """A peer rank a roster names."""

    pod_uid: str
    pod_name: str
    incarnation: str
    rank: int
    role: Role


@dataclass(frozen=True)
class HeldRoster:
    """A roster in the form the sidecar needs: `pairs` of (local rank, peer rank), and for each local
    rank with peers the finished line (contract.link.Peers) that tells it so. `hash` is Roster.hash."""

    cluster_uid: str
    pod_uid: str
    incarnation: str
    key: RosterKey
    hash: str
    pairs: tuple[tuple[int, PeerRef], ...] = ()
    lines: Mapping[int, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class PodState:
    """Everything the sidecar knows. `key` and `key_hash` outlive the roster they came with: after a
    new incarnation a cut-off operator must not slip in with an old key."""

    identity: Identity
    incarnation: str = ""
    expected_ranks: int = 0
    ranks: tuple[RankEntry, ...] = ()
    roster: HeldRoster | None = None
    key: RosterKey = ZERO
    key_hash: str = ""
    draining: bool = False
    retired: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()
    failed: tuple[FailedEntry, ...] = ()
    revision: int = 0
    """Goes up with every change that GET /v1/cards could show, except time-dependent ones."""

    def by_conn(self, conn: int) -> RankEntry | None:
        """The rank registered on this connection."""
        return next((r for r in self.ranks if r.conn == conn), None)

    def knows(self, conn: int) -> bool:
        """A rank registered on this connection, or said there that it failed."""
        return self.by_conn(conn) is not None or any(f.conn == conn for f in self.failed)

    @property
    def roster_hash(self) -> str:
        """Hash of the roster in force, empty when there is none."""
        return self.key_hash if self.roster is not None else ""


@dataclass(frozen=True)
class Send:
    """Write this message to the connection."""

    conn: int
    message: SidecarMessage


@dataclass(frozen=True)
class Push:
    """Write this rank's part of the roster (a finished contract.link.Peers line) to the connection."""

    conn: int
    line: bytes = field(repr=False)


@dataclass(frozen=True)
class Close:
    """End the connection, after what was sent before."""

    conn: int
    why: str


Effect = Send | Push | Close
Step = tuple[PodState, tuple[Effect, ...]]
