"""Who a pod may exchange KV with: written by the operator, obeyed by the ranks."""

from __future__ import annotations

from functools import total_ordering
from typing import Literal

from pydantic import Field

from pdtransfer.contract.base import ContractModel, content_hash, stable
from pdtransfer.contract.card import RankCard


@total_ordering
class RosterKey(ContractModel):
    """Order of rosters: the operator Lease's transitions, then a counter. A pod refuses a lower
    key, and the same key with other content (a cut-off operator must not overwrite its successor)."""

    term: int = Field(ge=0)
    counter: int = Field(ge=0)

    def __lt__(self, other: RosterKey) -> bool:
        return (self.term, self.counter) < (other.term, other.counter)


class Roster(ContractModel):
    """The peers of one pod incarnation. `peers[local rank]` are the cards that rank is wired to.

    The PUT names `pod_uid` and `incarnation`; another pod or incarnation answers 412."""

    version: Literal[1] = 1
    cluster_uid: str
    pod_uid: str
    incarnation: str
    key: RosterKey
    peers: dict[int, tuple[RankCard, ...]] = Field(default_factory=dict)

    @property
    def hash(self) -> str:
        """Hash of the content without the key: an equal hash needs no new PUT."""
        return content_hash(
            {
                "cluster": self.cluster_uid,
                "pod": self.pod_uid,
                "incarnation": self.incarnation,
                "peers": {
                    str(r): sorted(
                        (stable(c) for c in cards),
                        key=lambda c: (c["pod_uid"], c["incarnation"], c["agent_name"]),
                    )
                    for r, cards in sorted(self.peers.items())
                },
            }
        )


class RosterRefusal(ContractModel):
    """Body of 409 and 412: why the roster was not taken, and what the pod holds."""

    reason: Literal["LowerKey", "SameKeyOtherContent", "OtherPod", "OtherIncarnation", "OtherCluster"]
    message: str
    term: int = 0
    counter: int = 0
    hash: str = ""
    incarnation: str = ""
