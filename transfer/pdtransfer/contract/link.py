"""Messages between a rank and its pod's sidecar over the unix socket: one JSON object a line.

The connection is the registration: while it is open the card stands, its end removes it. A late
heartbeat only makes the rank stale (a thread that waits for the interpreter lock is not dead).

    rank -> sidecar   Hello (first), Heartbeat (every 0.5 s and on change), Verdicts;
                      or Failed, alone: a rank that lives and can move no KV any more
    sidecar -> rank   Peers (the rank's part of the roster, whole each time), Drain, Refuse (then closes)
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from pdtransfer.contract.base import ContractModel
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.verdict import Verdict

MAX_RANKS = 4096
"""Ranks of one pod: far more than any has devices, few enough to be listed one by one."""


class Hello(ContractModel):
    """First line of a rank. A Hello with a new incarnation takes the place of all older ones."""

    type: Literal["hello"] = "hello"
    card: RankCard
    expected_ranks: int = Field(gt=0, le=MAX_RANKS)


class Heartbeat(ContractModel):
    """Still alive; `inflight` is the number of transfers that are not settled."""

    type: Literal["heartbeat"] = "heartbeat"
    inflight: int = 0
    metrics: Any = None
    """`contract.metrics.Samples` every few seconds, else None. Checked piece by piece when it is taken:
    nothing in it may cost the heartbeat."""


class Verdicts(ContractModel):
    """All verdicts of the rank, whole each time."""

    type: Literal["verdicts"] = "verdicts"
    verdicts: tuple[Verdict, ...] = ()


class Failed(ContractModel):
    """The only line of a rank whose endpoint has failed: it has no card any more, and only a new start of its engine
    repairs that. It stands while the connection is open, as a card does."""

    type: Literal["failed"] = "failed"
    rank: int = Field(ge=0, lt=MAX_RANKS)
    incarnation: str
    message: str = Field(default="", max_length=2000)


class Peers(ContractModel):
    """The cards this rank is to be wired to, whole each time; anything else is to be dropped."""

    type: Literal["peers"] = "peers"
    term: int
    counter: int
    roster_hash: str
    peers: tuple[RankCard, ...] = ()


class Drain(ContractModel):
    """Finish what is in flight, refuse what is new."""

    type: Literal["drain"] = "drain"


class Probe(ContractModel):
    """Probe these peers (all when empty) again."""

    type: Literal["probe"] = "probe"
    pod_uids: tuple[str, ...] = ()


class Refuse(ContractModel):
    """The sidecar does not take this rank; it closes the connection after this line."""

    type: Literal["refuse"] = "refuse"
    reason: str
    message: str


RankMessage = Annotated[Hello | Heartbeat | Verdicts | Failed, Field(discriminator="type")]
SidecarMessage = Annotated[Peers | Drain | Probe | Refuse, Field(discriminator="type")]

rank_messages: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)
sidecar_messages: TypeAdapter[SidecarMessage] = TypeAdapter(SidecarMessage)
