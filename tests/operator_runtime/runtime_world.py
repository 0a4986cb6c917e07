"""Shared doubles: a fake API server with one PDCluster, and a small decide() to drive the runtime with.

The small decide keeps `prefill.replicas` pods alive and writes their count to status: enough to see
what the runtime does with decisions, and easy to check by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from pdoperator.api import names
from pdoperator.domain.actions import CreatePod, Decision, DeletePod, IssueCertificate, Memory
from pdoperator.domain.observed import Observed
from pdoperator.domain.settings import DecideSettings
from pdoperator.kube.events import EventRecorder
from pdoperator.kube.execute import KubeExecutor
from pdoperator.kube.fake import FakeKube
from pdoperator.kube.kinds import PDCLUSTER_API
from pdoperator.kube.observe import Observer
from pdoperator.pods.engine_probe import EngineProber
from pdoperator.pods.router import RouterClient
from pdoperator.pods.sidecar import SidecarClient
from pdoperator.runtime.act import Actor
from pdoperator.runtime.carried import ClusterState
from pdoperator.runtime.credentials import Credentials
from pdoperator.runtime.pki import new_authority
from pdoperator.runtime.reconciler import Decide, Reconciler

NOW = 1_800_000_000.0


def pdcluster(name: str = "a", namespace: str = "user", replicas: int = 2) -> dict[str, Any]:
    """A PDCluster as a user applies it."""
    return {
        "apiVersion": PDCLUSTER_API,
        "kind": "PDCluster",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"source": "/models/tiny"},
            "engine": {"type": "Reference", "image": "example/engine:1"},
            "transfer": {"fabric": {"type": "TCP"}},
            "prefill": {"replicas": replicas},
        },
    }


def small_decide(observed: Observed, memory: Memory, settings: DecideSettings) -> Decision:
    """Certificate first, then one pod per prefill replica; surplus pods go."""
    cluster = observed.cluster
    wanted = int(cluster.raw_spec["prefill"]["replicas"])
    actions: list[Any] = []
    if observed.certificate_not_after is None:
        actions.append(IssueCertificate(names.tls_secret_name(cluster.name), names.pod_server_name(cluster.uid)))
    have = {p.replica: p for p in observed.pods if not p.deleting}
    for replica in range(wanted):
        if replica not in have:
            actions.append(CreatePod(pod_manifest(cluster.name, replica)))
    for replica, pod in have.items():
        if replica >= wanted:
            actions.append(DeletePod(pod.name, pod.uid, "Surplus", "scaled down"))
    status = {
        "observedGeneration": cluster.generation,
        "seen": len(observed.pods),
        "problem": observed.api_error_reason,
    }
    kept = {k: v for k, v in cluster.status.items() if k != "certificates"}
    return Decision(tuple(actions), None if status == kept else status, memory, 5.0)


def pod_manifest(cluster: str, replica: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{cluster}-prefill-{replica}-0-abc-0",
            "labels": {names.LABEL_ROLE: "prefill", names.LABEL_REPLICA: str(replica)},
        },
        "spec": {"containers": [{"name": "engine", "image": "x"}]},
    }


def make_reconciler(
    kube: FakeKube,
    decide: Decide = small_decide,
    may_act: Callable[[], bool] = lambda: True,
    now: Callable[[], float] = lambda: NOW,
    prober: EngineProber | None = None,
) -> Reconciler:
    """A reconciler over the fake, with a CA of its own."""
    keys = Credentials(AUTHORITY, lambda: NOW)
    sidecars, routers, prober = SidecarClient(keys.client_context), RouterClient(), prober or EngineProber()
    events = EventRecorder(kube)
    executor = KubeExecutor(kube, keys, events, lambda: NOW)
    return Reconciler(
        kube=kube,
        observer=Observer(kube),
        sidecars=sidecars,
        routers=routers,
        prober=prober,
        actor=Actor(executor, sidecars, routers, keys.router_key, may_act, prober),
        events=events,
        keys=keys,
        decide=decide,
        settings=DecideSettings(),
        term=lambda: 1,
        now=now,
    )


AUTHORITY = new_authority(NOW)


def end_state(kube: FakeKube) -> dict[str, Any]:
    """What exists, without what legitimately differs between two runs (versions, keys)."""
    state: dict[str, Any] = {}
    for (_, kind, _, name), obj in kube.objects.items():
        bare = copy.deepcopy(obj)
        for field in ("resourceVersion", "uid", "creationTimestamp"):
            bare["metadata"].pop(field, None)
        for owner in bare["metadata"].get("ownerReferences") or []:
            owner.pop("uid", None)
        if kind == "Secret":
            bare["data"] = sorted(bare["data"])
        state[f"{kind}/{name}"] = bare
    return state


def state_of(obj: dict[str, Any]) -> ClusterState:
    """What the runtime carries about this PDCluster before its first reconcile."""
    meta = obj["metadata"]
    return ClusterState(meta["namespace"], meta["name"], meta["uid"])


def fresh() -> FakeKube:
    """An empty API server."""
    return FakeKube(now=lambda: NOW)
