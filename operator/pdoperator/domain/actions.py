"""What decide() wants done. Executed by kube.execute and pods.*; every action is idempotent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdoperator.api.names import PORT_ENGINE_HTTP
from pdtransfer.contract.roster import Roster


@dataclass(frozen=True)
class CreatePod:
    """Create-only: a pod of that name that exists is left as it is (409 is success only if it is ours)."""

    manifest: dict[str, Any]


@dataclass(frozen=True)
class DeletePod:
    """Delete with the UID as precondition."""

    name: str
    uid: str
    reason: str
    message: str


@dataclass(frozen=True)
class SetGate:
    """Server-side apply of the readiness gate's condition to pods/status, with metadata.uid."""

    name: str
    uid: str
    status: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Apply:
    """Server-side apply of a child (Service, Deployment, NetworkPolicy, PodDisruptionBudget ...)."""

    manifest: dict[str, Any]


@dataclass(frozen=True)
class Delete:
    """Delete of a child that is no longer wanted."""

    api_version: str
    kind: str
    name: str


@dataclass(frozen=True)
class IssueCertificate:
    """Make (or renew) the pods' certificate and write it to its Secret (create and patch only)."""

    secret_name: str
    server_name: str


@dataclass(frozen=True)
class WriteRouterKey:
    """Write the router's worker-API key (derived, never stored by the operator) to its Secret."""

    secret_name: str


@dataclass(frozen=True)
class PutRoster:
    """PUT to one pod's sidecar. `roster.key` was chosen by decide()."""

    pod_name: str
    pod_ip: str
    roster: Roster


@dataclass(frozen=True)
class DesiredWorker:
    """A worker that a router shall list."""

    url: str
    worker_type: str
    bootstrap_port: int | None
    pairing_protocol: str


@dataclass(frozen=True)
class SetWorkers:
    """Make one router pod list exactly these workers: `add` those, remove the ids in `remove`."""

    router_pod: str
    router_ip: str
    add: tuple[DesiredWorker, ...] = ()
    remove: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeEnd:
    """One engine pod that a real request goes to."""

    name: str
    uid: str
    ip: str
    restarts: int = 0
    """Of its engine container: a restart in place is another incarnation."""
    port: int = PORT_ENGINE_HTTP

    @property
    def incarnation(self) -> str:
        """What of the pod a result is about."""
        return f"{self.uid}/{self.restarts}"


@dataclass(frozen=True)
class StartProbe:
    """Send one small real request through this pair, in the background. `dp_rank` of `dp_size` attention-DP
    ranks of prefill is met by the choice of the room; `deadline` is seconds for the whole request."""

    prefill: ProbeEnd
    decode: ProbeEnd
    dp_rank: int = 0
    dp_size: int = 1
    deadline: float = 30.0


@dataclass(frozen=True)
class EmitEvent:
    """A Kubernetes Event on the PDCluster. type: Normal or Warning."""

    type: str
    reason: str
    message: str


Action = (
    CreatePod
    | DeletePod
    | SetGate
    | Apply
    | Delete
    | IssueCertificate
    | WriteRouterKey
    | PutRoster
    | SetWorkers
    | StartProbe
    | EmitEvent
)


@dataclass(frozen=True)
class PodBackoff:
    """Recreation history of one replica slot: kept in status, so that an operator restart keeps it."""

    failures: int = 0
    not_before: float = 0.0
    last_exit: str = ""


@dataclass(frozen=True)
class Memory:
    """What one cluster's reconciler carries from one decide() to the next, and may lose: a restart
    of the operator with an empty Memory must decide the same (it can only be slower to blame)."""

    stale_since: dict[str, float] = field(default_factory=dict)
    """Pod UID -> Unix seconds since which its card is stale."""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """Result of decide(). `status` is the whole status subresource to apply, or None when unchanged."""

    actions: tuple[Action, ...]
    status: dict[str, Any] | None
    memory: Memory
    requeue_after: float
    """Seconds until the next look when nothing wakes the reconciler earlier."""
