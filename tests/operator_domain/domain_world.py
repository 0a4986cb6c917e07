"""A world that obeys decide(): pods that load, show cards, hold rosters, probe peers and tell verdicts.

It follows the rules of the pods' control API (lower keys and changed content refused, verdicts for
current incarnations only) and records what happened, so that tests judge a history.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.actions import (
    Apply,
    CreatePod,
    Decision,
    Delete,
    DeletePod,
    EmitEvent,
    IssueCertificate,
    Memory,
    PutRoster,
    SetGate,
    SetWorkers,
    StartProbe,
    WriteRouterKey,
)
from pdoperator.domain.decide import DecideSettings, decide
from pdoperator.domain.observed import (
    ClusterObject,
    ContainerSeen,
    Observed,
    PodAnswer,
    PodSeen,
    RouterPodSeen,
    StoredSpec,
    Worker,
)
from pdoperator.domain.realprobe import ProbeOutcome, ProbeResult, ProbesSeen
from pdtransfer.contract.base import EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, PodCards, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind
from pdtransfer.contract.roster import Roster
from pdtransfer.contract.verdict import PodVerdicts, Verdict, VerdictState

UID = "11111111-2222-3333-4444-555555555555"
LAYERS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 16, 16


def quickstart(**changes: Any) -> dict[str, Any]:
    """Raw spec: prefill at TP 2, two decode replicas at TP 1, over TCP."""
    raw: dict[str, Any] = {
        "model": {
            "servedName": "tiny",
            "volume": {"configMap": {"name": "tiny"}},
            "geometry": {"attention": "GQA", "layers": 4, "kvHeads": 2, "headDim": 16, "dtype": "float32"},
        },
        "engine": {"type": "Reference", "image": "pd:1"},
        "kvCache": {"pageSize": 16, "dtype": "float32"},
        "transfer": {"backend": "PDCluster", "image": "pd:1", "fabric": {"type": "TCP"}},
        "prefill": {"replicas": 1, "tensorParallelSize": 2},
        "decode": {"replicas": 2, "tensorParallelSize": 1},
        "router": {"type": "SMG", "replicas": 1},
    }
    for path, value in changes.items():
        at = raw
        *way, last = path.split("__")
        for step in way:
            at = at.setdefault(step, {})
        at[last] = value
    if raw["engine"].get("type") != "Reference" and not any(path.startswith("kvCache") for path in changes):
        raw["kvCache"]["dtype"] = "bfloat16"  # SGLang keeps no KV in float32
    return raw


def make_cards(
    pod_uid: str,
    role: Role,
    incarnation: str,
    tp: int,
    *,
    revision: str = "",
    model: str = "tiny",
    memory: MemoryKind | None = MemoryKind.DRAM,
    page: int = PAGE,
    devices: tuple[str, ...] = (),
) -> tuple[RankCard, ...]:
    """Sealed cards of one pod's ranks: GQA, 2 KV heads of 16, float32, 4 layers."""
    cards = []
    count = max(1, KV_HEADS // tp)
    for rank in range(tp):
        heads = HeadSlice(first=(rank * KV_HEADS // tp), count=count, total=KV_HEADS)
        regions = tuple(
            Region(layer=i, kind=kind, item_bytes=page * count * HEAD_DIM * 4, items=8, memory=memory)
            for kind in (RegionKind.KEY, RegionKind.VALUE)
            for i in range(LAYERS)
        )
        cards.append(
            RankCard(
                cluster_uid=UID,
                pod_uid=pod_uid,
                role=role,
                revision=revision,
                incarnation=incarnation,
                model=ModelIdentity(
                    name=model, dtype="float32", layers=LAYERS, total_kv_heads=KV_HEADS, head_dim=HEAD_DIM
                ),
                layout=RankLayout(
                    page_tokens=page,
                    kv_dtype="float32",
                    heads=heads,
                    coordinates=RankCoordinates(tp=rank, tp_size=tp),
                    regions=regions,
                ),
                engine=EngineFacts(type=EngineType.REFERENCE, version="0.1.0", max_total_tokens=128),
                agent_name=f"{pod_uid}-{incarnation}-{rank}",
                devices=devices,
            ).sealed()
        )
    return tuple(cards)


@dataclass
class FakePod:
    """One engine pod. `engine`: loading | up | crashed."""

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

    @property
    def cards(self) -> tuple[RankCard, ...]:
        if self.engine != "up":
            return ()
        return make_cards(
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


class World:
    """One PDCluster and its pods. `step()` is one reconcile followed by what the pods do."""

    def __init__(self, raw: dict[str, Any], *, settings: DecideSettings | None = None) -> None:
        self.now = 1_700_000_000.0
        self.settings = settings or DecideSettings()
        self.status: dict[str, Any] = {}
        self.generation = 0
        self.memory = Memory()
        self.term = 1
        self.pods: dict[str, FakePod] = {}
        self.workers: dict[str, Worker] = {}
        self.router_up = False
        self.router_manifest: dict[str, Any] | None = None
        self.applied: dict[str, str] = {}
        self.stored: dict[str, StoredSpec] = {}
        self.certificate: float | None = None
        self.serial = 0
        self.refused: list[str] = []
        self.events: list[EmitEvent] = []
        self.cut: set[frozenset[str]] = set()
        self.created: list[str] = []
        self.api_error = ""
        self.api_error_reason = ""
        self.transport = "TCP"
        self.probes: list[ProbeResult] = []
        self.probed: list[StartProbe] = []
        self.last: Decision | None = None
        self.edit(raw)

    def edit(self, raw: dict[str, Any]) -> None:
        """Apply a spec."""
        self.generation += 1
        self.raw = raw
        self.spec: PDClusterSpec | None
        self.spec_error = ""
        try:
            self.spec = PDClusterSpec.model_validate(raw)
        except ValueError as e:
            self.spec, self.spec_error = None, str(e).splitlines()[0]

    # What the operator sees.

    def verdicts(self, pod: FakePod) -> tuple[Verdict, ...]:
        if pod.roster is None or pod.engine != "up" or pod.roster.incarnation != pod.incarnation:
            return ()
        out = []
        for rank, peers in pod.roster.peers.items():
            for card in peers:
                peer = self.pods.get(card.pod_uid)
                state, reason = VerdictState.PROBING, ""
                if (
                    frozenset((pod.uid, card.pod_uid)) in self.cut
                    or peer is None
                    or peer.engine != "up"
                    or peer.incarnation != card.incarnation
                ):
                    state, reason = VerdictState.UNREACHABLE, "PeerUnreachable"
                elif peer.roster is not None and peer.roster.incarnation == peer.incarnation:
                    knows = any(
                        c.pod_uid == pod.uid and c.incarnation == pod.incarnation
                        for cs in peer.roster.peers.values()
                        for c in cs
                    )
                    state = VerdictState.WIRED if knows else VerdictState.PROBING
                out.append(
                    Verdict(
                        rank=rank,
                        incarnation=pod.incarnation,
                        peer_pod_uid=card.pod_uid,
                        peer_incarnation=card.incarnation,
                        peer_rank=card.rank,
                        state=state,
                        reason=reason,
                        bytes_moved=4096 if state is VerdictState.WIRED else 0,
                        seconds=1e-5 if state is VerdictState.WIRED else 0.0,
                        checksum_ok=state is VerdictState.WIRED,
                        transport=self.transport,
                        evidence="port counters",
                        at=self.now,
                    )
                )
        return tuple(out)

    def wired(self, pod: FakePod) -> bool:
        return any(v.state is VerdictState.WIRED for v in self.verdicts(pod))

    def seen(self, pod: FakePod) -> PodSeen:
        up = pod.engine == "up"
        containers_ready = up and (self.wired(pod) or not pod.gated) and pod.phase == "Running"
        return PodSeen(
            name=pod.name,
            uid=pod.uid,
            role=pod.role.value,
            replica=pod.replica,
            revision=pod.revision,
            attempt=pod.attempt,
            phase=pod.phase,
            deleting=pod.deleting,
            node="n",
            ip=pod.ip,
            ready=containers_ready and (pod.gate == "True" or not pod.gated) and not pod.deleting,
            containers_ready=containers_ready,
            scheduled=True,
            unschedulable_message="",
            kv_wired=pod.gate,
            kv_wired_since=pod.gate_since,
            created=pod.created,
            containers=(
                ContainerSeen("pdtransfer", ready=self.wired(pod), running=True),
                ContainerSeen(
                    "engine",
                    ready=up,
                    running=pod.engine != "crashed",
                    waiting_reason="CrashLoopBackOff" if pod.engine == "crashed" else "",
                    restarts=pod.restarts,
                    last_exit_code=pod.exit_code,
                    last_exit_reason="Error" if pod.exit_code else "",
                ),
            ),
        )

    def answer(self, pod: FakePod) -> PodAnswer:
        if not pod.reachable:
            return PodAnswer(error="OperatorCannotReachPods", message="timed out", at=self.now)
        roster = pod.roster
        cards = PodCards(
            cluster_uid=UID,
            pod_uid=pod.uid,
            role=pod.role,
            incarnation=pod.incarnation if pod.engine == "up" else "",
            expected_ranks=pod.tp,
            cards=pod.cards,
            roster_term=pod.key[0],
            roster_counter=pod.key[1],
            roster_hash=roster.hash if roster else "",
        )
        verdicts = PodVerdicts(
            cluster_uid=UID,
            pod_uid=pod.uid,
            role=pod.role,
            incarnation=cards.incarnation,
            roster_term=pod.key[0],
            roster_counter=pod.key[1],
            roster_hash=cards.roster_hash,
            verdicts=self.verdicts(pod),
        )
        return PodAnswer(cards=cards, verdicts=verdicts, at=self.now)

    def observe(self, *, term: int | None = None) -> Observed:
        cluster = ClusterObject(
            "quickstart",
            "ns",
            UID,
            self.generation,
            self.raw,
            self.spec,
            self.spec_error,
            status=copy.deepcopy(self.status),
        )
        live = [p for p in self.pods.values() if p.phase == "Running"]
        router = PodSeen(
            name="quickstart-router-x", uid="router", role="router", replica=0, revision="", attempt=0,
            phase="Running", deleting=False, node="n", ip="10.9.9.9", ready=self.router_up,
            containers_ready=self.router_up, scheduled=True, unschedulable_message="", kv_wired="",
            kv_wired_since=0.0, created=self.now,
        )  # fmt: skip
        routers = ()
        if self.router_manifest is not None:
            routers = (RouterPodSeen(router, tuple(self.workers.values()) if self.router_up else None),)
        return Observed(
            now=self.now,
            cluster=cluster,
            pods=tuple(self.seen(p) for p in self.pods.values()),
            answers={p.uid: self.answer(p) for p in live if p.gated},
            routers=routers,
            probes=ProbesSeen(results=tuple(self.probes)),
            router_deployment=self.router_manifest,
            children=dict(self.applied),
            stored=tuple(self.stored.values()),
            term=self.term if term is None else term,
            certificate_not_after=self.certificate,
            api_error=self.api_error,
            api_error_reason=self.api_error_reason,
        )

    # What its actions do.

    def put(self, action: PutRoster) -> str:
        """The sidecar's rule. Returns '' when taken, else why not."""
        r = action.roster
        pod = self.pods.get(r.pod_uid)
        if pod is None or not pod.reachable or pod.engine != "up":
            return "NoAnswer"
        if r.incarnation != pod.incarnation:
            return "OtherIncarnation"
        key = (r.key.term, r.key.counter)
        if key < pod.key:
            return "LowerKey"
        if key == pod.key and pod.roster is not None and r.hash != pod.roster.hash:
            return "SameKeyOtherContent"
        pod.roster, pod.key = r, key
        pod.history.append((key, r.hash))
        return ""

    def answered(self, probe: StartProbe) -> ProbeResult:
        """What comes of a real request: here every one is served."""
        return ProbeResult(probe, ProbeOutcome.SERVED, seconds=0.1, at=self.now)

    def act(self, decision: Decision) -> None:
        self.probes = []
        for a in decision.actions:
            if isinstance(a, StartProbe):
                self.probed.append(a)
                self.probes.append(self.answered(a))
            elif isinstance(a, CreatePod):
                self._create(a.manifest)
            elif isinstance(a, DeletePod):
                if a.uid in self.pods:
                    del self.pods[a.uid]
            elif isinstance(a, SetGate):
                pod = self.pods[a.uid]
                pod.gate, pod.gate_since = ("True" if a.status else "False"), self.now
            elif isinstance(a, PutRoster):
                why = self.put(a)
                if why:
                    self.refused.append(why)
            elif isinstance(a, SetWorkers):
                for i in a.remove:
                    del self.workers[i]
                for w in a.add:
                    self.workers[w.url] = Worker(
                        w.url, w.url, w.worker_type, w.bootstrap_port, w.pairing_protocol, True
                    )
            elif isinstance(a, Apply) and a.manifest["kind"] == "ControllerRevision":
                m = a.manifest
                self.stored[m["metadata"]["name"]] = StoredSpec(
                    m["metadata"]["name"], m["revision"], copy.deepcopy(m["data"]["spec"])
                )
            elif isinstance(a, Delete) and a.kind == "ControllerRevision":
                del self.stored[a.name]
            elif isinstance(a, Apply):
                m = a.manifest
                self.applied[f"{m['kind']}/{m['metadata']['name']}"] = m["metadata"]["annotations"][
                    "pdcluster.io/applied-hash"
                ]
                if m["kind"] == "Deployment":
                    self.router_manifest = m
            elif isinstance(a, IssueCertificate):
                self.certificate = self.now + 90 * 86400
            elif isinstance(a, EmitEvent):
                self.events.append(a)
            else:
                assert isinstance(a, Delete | WriteRouterKey)
        if decision.status is not None:
            self.status = decision.status
        self.memory = decision.memory

    def _create(self, m: dict[str, Any]) -> None:
        labels = m["metadata"]["labels"]
        name = m["metadata"]["name"]
        assert name not in {p.name for p in self.pods.values()}, f"{name} exists"
        self.serial += 1
        self.created.append(name)
        args = m["spec"]["containers"][0]["args"]
        self.pods[f"u{self.serial}"] = FakePod(
            name=name,
            uid=f"u{self.serial}",
            role=Role(labels[names.LABEL_ROLE]),
            replica=int(labels[names.LABEL_REPLICA]),
            revision=labels[names.LABEL_REVISION],
            attempt=int(name.rsplit("-", 1)[1]),
            tp=int(args[args.index("--tp-size") + 1]),
            ip=f"10.0.0.{self.serial}",
            created=self.now,
            gated="readinessGates" in m["spec"],
            model=args[args.index("--served-model-name") + 1] if "--served-model-name" in args else "tiny",
        )

    def step(self, seconds: float = 1.0) -> Decision:
        """One reconcile, then a second passes and loading engines come up."""
        decision = decide(self.observe(), self.memory, self.settings)
        self.act(decision)
        self.last = decision
        self.now += seconds
        for pod in self.pods.values():
            if pod.engine == "loading":
                pod.engine = "up"
        if self.router_manifest is not None:
            self.router_up = True
        return decision

    def run(self, limit: int = 30) -> int:
        """Steps until nothing changes any more; how many that took."""
        for i in range(limit):
            d = self.step()
            if not d.actions and d.status is None and all(p.engine != "loading" for p in self.pods.values()):
                return i
        raise AssertionError(f"still busy after {limit} steps: {d.actions}, {self.condition('Ready')}")

    def restart_rank(self, pod: FakePod) -> None:
        """The engine container ends and starts again in place: new incarnation, no roster."""
        self.serial += 1
        pod.incarnation = f"i{self.serial}"
        pod.roster = None

    def restart_operator(self) -> None:
        """A new process with a higher term and no memory."""
        self.memory = Memory()
        self.term += 1

    # What tests ask.

    def condition(self, kind: str) -> dict[str, Any]:
        return next(c for c in self.status["conditions"] if c["type"] == kind)

    def side(self, role: Role) -> list[FakePod]:
        return sorted((p for p in self.pods.values() if p.role is role), key=lambda p: p.replica)

    def gates(self) -> dict[str, str]:
        return {p.name: p.gate for p in self.pods.values()}

    def routed(self) -> set[str]:
        return {w.url for w in self.workers.values()}


__all__ = ["FakePod", "World", "make_cards", "quickstart", "replace"]
