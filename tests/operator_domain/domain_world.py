"""A world that obeys decide(): pods that load, show cards, hold rosters, probe peers and tell verdicts.

It follows the rules of the pods' control API (lower keys and changed content refused, verdicts for
current incarnations only) and records what happened, so that tests judge a history.
"""

from __future__ import annotations

import copy
from typing import Any

from domain_makers import UID, quickstart
from fake_pod import FakePod

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
    Observed,
    PodAnswer,
    PodSeen,
    RouterPodSeen,
    StoredSpec,
    Worker,
)
from pdoperator.domain.realprobe import ProbeOutcome, ProbeResult, ProbesSeen
from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import Verdict, VerdictState


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
        if pod.roster is None or pod.engine != "up" or pod.failed or pod.roster.incarnation != pod.incarnation:
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
                    or peer.failed
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
        return pod.seen(wired=self.wired(pod))

    def answer(self, pod: FakePod) -> PodAnswer:
        if not pod.reachable:
            return PodAnswer(error="OperatorCannotReachPods", message="timed out", at=self.now)
        return pod.answer(self.verdicts(pod), self.now)

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

    def set_workers(self, a: SetWorkers) -> None:
        """What the router makes of it: here all of it at once."""
        for i in a.remove:
            del self.workers[i]
        for w in a.add:
            self.workers[w.url] = Worker(w.url, w.url, w.worker_type, w.bootstrap_port, w.pairing_protocol, True)

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
                self.set_workers(a)
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


def ready_world(**changes: object) -> World:
    """A world of this quickstart that has become Ready."""
    w = World(quickstart(**changes))
    w.run()
    assert w.condition("Ready")["status"] == "True", w.condition("Ready")
    return w
