"""Carries out what decide() wants. Every action stands alone: its failure is reported, the rest go on.

Order is kept between kinds of action; a run of equal kinds goes out together (400 pods one by one
would take minutes). Before each action the caller's `may_act` is asked: an operator that lost its
Lease stops in the middle.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdoperator.api import names
from pdoperator.api.status import timestamp
from pdoperator.domain.actions import (
    Action,
    Apply,
    CreatePod,
    Delete,
    DeletePod,
    EmitEvent,
    IssueCertificate,
    SetGate,
    WriteRouterKey,
)
from pdoperator.domain.lastwords import one_line
from pdoperator.domain.observed import ClusterObject, Observed
from pdoperator.domain.pods import owner_reference
from pdoperator.kube.events import EventRecorder
from pdoperator.kube.observe import Problem, problem_of
from pdoperator.kube.parse import owned_by
from pdoperator.kube.port import KubeError, KubePort, Manifest

log = logging.getLogger(__name__)


class NotLeading(Exception):
    """The Lease is lost; nothing more may be done."""


@dataclass(frozen=True)
class PodCertificate:
    """What goes into a certificate Secret. `not_after` is Unix seconds."""

    ca: bytes
    certificate: bytes
    key: bytes
    not_after: float
    ca_fingerprint: str


class SecretSource(Protocol):
    """Makes the two secrets a PDCluster's pods need (runtime.credentials)."""

    def issue(self, server_name: str) -> PodCertificate: ...
    def router_key(self, cluster_uid: str) -> str: ...


@dataclass(frozen=True)
class Outcome:
    """What became of one action. `certificates` is what status has to remember of an issued one."""

    action: Action
    problem: Problem | None = None
    certificates: dict[str, Any] | None = None
    silent: bool = False
    """Nothing was written: an event that was told lately."""


class KubeExecutor:
    """Runs the actions that go to the API server; runtime.act adds those that go to pods."""

    def __init__(
        self,
        kube: KubePort,
        secrets: SecretSource,
        events: EventRecorder,
        now: Callable[[], float],
    ) -> None:
        self._kube, self._secrets, self._events = kube, secrets, events
        self._now = now

    async def run(self, observed: Observed, action: Action) -> Outcome:
        """One action; KubeError becomes a Problem."""
        cluster = observed.cluster
        try:
            match action:
                case CreatePod():
                    await self._create_pod(cluster, action)
                case DeletePod():
                    await self._delete_pod(cluster, action)
                case SetGate():
                    await self._set_gate(observed, action)
                case Apply():
                    await self._apply_child(cluster, self._owned(cluster, action.manifest))
                case Delete():
                    await self._kube.delete(action.api_version, action.kind, cluster.namespace, action.name)
                case IssueCertificate():
                    return Outcome(action, certificates=await self._issue(cluster, action))
                case WriteRouterKey():
                    key = self._secrets.router_key(cluster.uid)
                    ours = observed.router_deployment is not None
                    await self._write_secret(cluster, action.secret_name, {"key": key.encode()}, again=ours)
                case EmitEvent():
                    return Outcome(action, silent=not await self._emit(cluster, action))
                case _:
                    raise TypeError(f"{type(action).__name__} is not an action of the API server")
        except KubeError as error:
            return Outcome(action, problem_of(error, describe(action)))
        return Outcome(action)

    async def _create_pod(self, cluster: ClusterObject, action: CreatePod) -> None:
        manifest = self._owned(cluster, action.manifest)
        try:
            await self._kube.create(manifest)
        except KubeError as error:
            if error.status != 409:
                raise
            # The name is taken: ours from a run whose answer was lost, or somebody else's pod.
            found = await self._kube.get("v1", "Pod", cluster.namespace, manifest["metadata"]["name"])
            if found is not None and not owned_by(found, cluster.uid):
                raise _taken(found) from error

    async def _apply_child(self, cluster: ClusterObject, manifest: Manifest) -> None:
        """Never over an object of somebody else: it would be changed, and collected with the PDCluster."""
        meta = manifest["metadata"]
        found = await self._kube.get(manifest["apiVersion"], manifest["kind"], cluster.namespace, meta["name"])
        if found is not None and not owned_by(found, cluster.uid):
            raise _taken(found)
        if found is not None:
            # What was looked at, not what took its name meanwhile.
            manifest = {**manifest, "metadata": {**meta, "uid": found["metadata"]["uid"]}}
        await self._kube.apply(manifest)

    async def _delete_pod(self, cluster: ClusterObject, action: DeletePod) -> None:
        try:
            await self._kube.delete("v1", "Pod", cluster.namespace, action.name, uid=action.uid)
        except KubeError as error:
            # 409: the name belongs to another pod by now, so the one meant is gone.
            if error.status != 409:
                raise

    async def _set_gate(self, observed: Observed, action: SetGate) -> None:
        pod = next((p for p in observed.pods if p.uid == action.uid), None)
        wanted = "True" if action.status else "False"
        # lastTransitionTime is when the status moved, not when its message did.
        unmoved = pod is not None and pod.kv_wired == wanted and pod.kv_wired_since > 0
        since = pod.kv_wired_since if pod is not None and unmoved else self._now()
        manifest: Manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": action.name, "namespace": observed.cluster.namespace, "uid": action.uid},
            "status": {
                "conditions": [
                    {
                        "type": names.GATE_KV_WIRED,
                        "status": wanted,
                        "reason": action.reason,
                        "message": action.message,
                        "lastTransitionTime": timestamp(since),
                    }
                ]
            },
        }
        try:
            await self._kube.apply(manifest, subresource="status")
        except KubeError as error:
            # That pod is gone: 404, or 422 because its name belongs to another one by now.
            if error.status != 404 and not (error.status == 422 and "metadata.uid" in error.message):
                raise

    async def _issue(self, cluster: ClusterObject, action: IssueCertificate) -> dict[str, Any]:
        made = self._secrets.issue(action.server_name)
        files = {"ca.crt": made.ca, "tls.crt": made.certificate, "tls.key": made.key}
        ours = bool(cluster.status.get("certificates"))
        await self._write_secret(cluster, action.secret_name, files, "kubernetes.io/tls", again=ours)
        return {"notAfter": timestamp(made.not_after), "fingerprint": made.ca_fingerprint}

    async def _write_secret(
        self, cluster: ClusterObject, name: str, data: dict[str, bytes], kind: str = "Opaque", *, again: bool
    ) -> None:
        """`again`: the operator made this Secret before, and may take back what others changed in it."""
        secret: Manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": cluster.namespace},
            "type": kind,
            "data": {k: base64.b64encode(v).decode() for k, v in data.items()},
        }
        try:
            # Secrets are not read: not forced, fields that somebody else wrote make a conflict, so that a
            # user's Secret of that name is left alone.
            await self._kube.apply(self._owned(cluster, secret), force=again)
        except KubeError as error:
            if error.status == 409:
                raise KubeError(
                    409,
                    "Conflict",
                    f"Secret {name} exists and was written by somebody else; rename or delete it, the operator "
                    "then makes its own",
                ) from error
            raise

    async def _emit(self, cluster: ClusterObject, action: EmitEvent) -> bool:
        try:
            return await self._events.emit(cluster, action)
        except KubeError as error:
            # An event that can not be written must not turn a healthy PDCluster unhealthy.
            log.warning(
                "namespace=%s name=%s event=%s error=%r", cluster.namespace, cluster.name, action.reason, error.message
            )
            return False

    @staticmethod
    def _owned(cluster: ClusterObject, manifest: Manifest) -> Manifest:
        """With namespace, our labels and the owner reference, whoever made the manifest."""
        meta = dict(manifest.get("metadata") or {})
        meta["namespace"] = cluster.namespace
        ours = {names.LABEL_CLUSTER_UID: cluster.uid, names.LABEL_MANAGED_BY: names.MANAGED_BY}
        meta["labels"] = {**(meta.get("labels") or {}), **ours}
        if not owned_by({"metadata": meta}, cluster.uid):
            meta["ownerReferences"] = [*(meta.get("ownerReferences") or []), owner_reference(cluster)]
        return {**manifest, "metadata": meta}


def _taken(found: Manifest) -> KubeError:
    meta = found["metadata"]
    what = f"{found.get('kind', 'object')} {meta['name']} exists and belongs to something else"
    if meta.get("deletionTimestamp"):
        return KubeError(409, "AlreadyExists", f"{what}, which is being deleted: waiting for its end")
    return KubeError(409, "AlreadyExists", f"{what}; rename or delete it")


async def run_all(
    actions: Sequence[Action],
    one: Callable[[Action], Awaitable[Outcome]],
    may_act: Callable[[], bool],
) -> list[Outcome]:
    """Every action, runs of one kind together. Raises NotLeading as soon as `may_act` says no."""
    outcomes: list[Outcome] = []

    async def guarded(action: Action) -> Outcome:
        if not may_act():
            raise NotLeading
        return await one(action)

    for _, group in itertools.groupby(actions, key=type):
        results = await asyncio.gather(*(guarded(a) for a in group), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
            outcomes.append(result)
    return outcomes


def describe(action: Action) -> str:
    """The action in a few words, for messages and logs (never a manifest: it may hold secrets)."""
    match action:
        case CreatePod() | Apply():
            kind = action.manifest.get("kind", "object")
            return (
                f"{'create' if isinstance(action, CreatePod) else 'apply'} {kind} {action.manifest['metadata']['name']}"
            )
        case DeletePod():
            return f"delete Pod {action.name}"
        case SetGate():
            why = "" if action.status else f" ({action.reason}: {one_line(action.message)})"
            return f"set {names.GATE_KV_WIRED}={action.status} of Pod {action.name}{why}"
        case Delete():
            return f"delete {action.kind} {action.name}"
        case IssueCertificate() | WriteRouterKey():
            return f"write Secret {action.secret_name}"
        case EmitEvent():
            return f"write Event {action.reason}"
        case _:
            return type(action).__name__
