"""What one reconcile saw: frozen, built by kube.observe and pods.*, read by domain.decide.

Times are Unix seconds. Nothing here is cached over reconciles except what `Memory` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdoperator.api.names import CONTAINER_ENGINE
from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.realprobe import ProbesSeen
from pdtransfer.contract.base import Role
from pdtransfer.contract.card import PodCards
from pdtransfer.contract.verdict import PodVerdicts


@dataclass(frozen=True)
class ClusterObject:
    """The PDCluster itself. `spec` is None when it does not parse; `spec_error` then says why."""

    name: str
    namespace: str
    uid: str
    generation: int
    raw_spec: dict[str, Any]
    spec: PDClusterSpec | None
    spec_error: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    deleting: bool = False


@dataclass(frozen=True)
class ContainerSeen:
    """One container's state as the kubelet tells it."""

    name: str
    ready: bool = False
    running: bool = False
    started: float = 0.0
    """Since when it runs, if it does."""
    waiting_reason: str = ""
    waiting_message: str = ""
    restarts: int = 0
    last_exit_code: int | None = None
    last_exit_reason: str = ""
    last_exit_message: str = ""
    """End of its termination message or log, as the container wrote it: shown only through lastwords."""


@dataclass(frozen=True)
class PodSeen:
    """One child pod that carries our labels and our owner UID."""

    name: str
    uid: str
    role: str
    replica: int
    revision: str
    attempt: int
    phase: str
    deleting: bool
    node: str
    ip: str
    ready: bool
    """Pod condition Ready."""
    containers_ready: bool
    scheduled: bool
    unschedulable_message: str
    kv_wired: str
    """Status of the readiness gate's condition: '' when never written, else True or False."""
    kv_wired_since: float
    created: float
    gate_reason: str = ""
    """Why the gate is what it is, as it was written."""
    containers: tuple[ContainerSeen, ...] = ()
    grace_seconds: int = 30
    warnings: tuple[tuple[str, str], ...] | None = None
    """(reason, message) of the pod's latest Warning events, newest first; read only while none of its
    containers starts. None: not read, or not allowed to."""

    @property
    def engine_is_ready(self) -> bool:
        """The engine container passes its readiness probe."""
        return any(c.name == CONTAINER_ENGINE and c.ready for c in self.containers)

    @property
    def engine_role(self) -> Role | None:
        """Role of an engine pod; None for router pods."""
        return Role(self.role) if self.role in (Role.PREFILL, Role.DECODE) else None


@dataclass(frozen=True)
class PodAnswer:
    """What a pod's sidecar answered in this reconcile. `error` is a Reason value when it did not:
    OperatorCannotReachPods, WrongCertificate, InvalidCard."""

    cards: PodCards | None = None
    verdicts: PodVerdicts | None = None
    error: str = ""
    message: str = ""
    at: float = 0.0


@dataclass(frozen=True)
class Worker:
    """One worker as a router lists it."""

    id: str
    url: str
    worker_type: str
    bootstrap_port: int | None
    pairing_protocol: str
    healthy: bool
    draining: bool = False
    """Its removal is under way: it gets no new request, and its URL can not be added again yet."""

    @property
    def serves(self) -> bool:
        """The router sends requests to it."""
        return self.healthy and not self.draining


@dataclass(frozen=True)
class RouterPodSeen:
    """One router pod and the workers it lists (None when it did not answer; `error` says why)."""

    pod: PodSeen
    workers: tuple[Worker, ...] | None = None
    error: str = ""


@dataclass(frozen=True)
class NodeOffer:
    """What one schedulable node offers of the extended resources a spec asks for."""

    name: str
    allocatable: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredSpec:
    """A spec that was launched, as its ControllerRevision keeps it; a higher number is newer."""

    name: str
    number: int
    raw: dict[str, Any]


@dataclass(frozen=True)
class Observed:
    """Everything one decide() reads."""

    now: float
    cluster: ClusterObject
    pods: tuple[PodSeen, ...] = ()
    answers: dict[str, PodAnswer] = field(default_factory=dict)
    """By pod UID; only pods that were asked."""
    routers: tuple[RouterPodSeen, ...] = ()
    probes: ProbesSeen = field(default_factory=ProbesSeen)
    """Real requests of the operator's own: which are under way, and what came of those that ended."""
    router_deployment: dict[str, Any] | None = None
    services: frozenset[str] = frozenset()
    """Names of our Services that exist."""
    children: dict[str, str] | None = None
    """`Kind/name` of every other child that exists -> its annotation pdcluster.io/applied-hash ('' when
    it has none); Services, Deployments, NetworkPolicies, PodDisruptionBudgets. None: not listed."""
    stored: tuple[StoredSpec, ...] | None = None
    """Specs that fitted before. None: not listed."""
    nodes: tuple[NodeOffer, ...] | None = None
    """None when the operator may not list nodes."""
    term: int = 0
    """Transitions count of the operator's Lease."""
    certificate_not_after: float | None = None
    """When the pods' current certificate ends; None when none was made yet (or none is needed)."""
    api_error: str = ""
    """The last API refusal that stood in the way (403 ...), for status."""
    api_error_reason: str = ""
