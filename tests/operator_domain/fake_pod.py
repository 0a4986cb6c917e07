"""One engine pod of the domain's world: what it loads, shows as cards, and says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from domain_makers import PAGE, UID, make_cards

from pdoperator.domain.observed import (
    ContainerSeen,
    PodAnswer,
    PodSeen,
)
from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import FailedRank, PodCards, RankCard
from pdtransfer.contract.roster import Roster
from pdtransfer.contract.verdict import PodVerdicts, Verdict


@dataclass
class FakePod:
    """One engine pod. `engine`: loading | up | crashed; `failed`: what its rank 0 says once it can move no KV."""

    name: str
    uid: str
    role: Role
    replica: int
    revision: str
    attempt: int
    tp: int
    ip: str
    created: float
    phase: str = "Running"
    deleting: bool = False
    engine: str = "loading"
    incarnation: str = "i0"
    gate: str = ""
    gate_since: float = 0.0
    roster: Roster | None = None
    key: tuple[int, int] = (0, 0)
    reachable: bool = True
    model: str = "tiny"
    memory: MemoryKind | None = MemoryKind.DRAM
    page: int = PAGE
    devices: tuple[str, ...] = ()
    history: list[tuple[tuple[int, int], str]] = field(default_factory=list)
    restarts: int = 0
    exit_code: int | None = None
    gated: bool = True
    failed: str = ""

    @property
    def cards(self) -> tuple[RankCard, ...]:
        if self.engine != "up":
            return ()
        cards = make_cards(
            self.uid,
            self.role,
            self.incarnation,
            self.tp,
            revision=self.revision,
            model=self.model,
            memory=self.memory,
            page=self.page,
            devices=self.devices,
        )
        return cards[1:] if self.failed else cards

    def seen(self, *, wired: bool) -> PodSeen:
        """As the API server shows it. `wired`: its sidecar says that its ranks are."""
        up = self.engine == "up"
        containers_ready = up and (wired or not self.gated) and self.phase == "Running"
        return PodSeen(
            name=self.name,
            uid=self.uid,
            role=self.role.value,
            replica=self.replica,
            revision=self.revision,
            attempt=self.attempt,
            phase=self.phase,
            deleting=self.deleting,
            node="n",
            ip=self.ip,
            ready=containers_ready and (self.gate == "True" or not self.gated) and not self.deleting,
            containers_ready=containers_ready,
            scheduled=True,
            unschedulable_message="",
            kv_wired=self.gate,
            kv_wired_since=self.gate_since,
            created=self.created,
            containers=(
                ContainerSeen("pdtransfer", ready=wired, running=True),
                ContainerSeen(
                    "engine",
                    ready=up,
                    running=self.engine != "crashed",
                    waiting_reason="CrashLoopBackOff" if self.engine == "crashed" else "",
                    restarts=self.restarts,
                    last_exit_code=self.exit_code,
                    last_exit_reason="Error" if self.exit_code else "",
                ),
            ),
        )

    def answer(self, found: tuple[Verdict, ...], now: float) -> PodAnswer:
        """What its sidecar tells the operator."""
        roster = self.roster
        cards = PodCards(
            cluster_uid=UID,
            pod_uid=self.uid,
            role=self.role,
            incarnation=self.incarnation if self.engine == "up" else "",
            expected_ranks=self.tp,
            cards=self.cards,
            roster_term=self.key[0],
            roster_counter=self.key[1],
            roster_hash=roster.hash if roster else "",
            failed=(FailedRank(rank=0, message=self.failed),) if self.failed else (),
        )
        verdicts = PodVerdicts(
            cluster_uid=UID,
            pod_uid=self.uid,
            role=self.role,
            incarnation=cards.incarnation,
            roster_term=self.key[0],
            roster_counter=self.key[1],
            roster_hash=cards.roster_hash,
            verdicts=found,
        )
        return PodAnswer(cards=cards, verdicts=verdicts, at=now)
