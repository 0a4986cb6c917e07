"""API objects (plain dictionaries) to what decide() reads. Pure; tolerant of absent fields."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from pdoperator.api.names import ANNOTATION_ATTEMPT, GATE_KV_WIRED, LABEL_REPLICA, LABEL_REVISION, LABEL_ROLE
from pdoperator.api.spec import PDClusterSpec
from pdoperator.api.status import parse_timestamp
from pdoperator.domain.observed import ClusterObject, ContainerSeen, NodeOffer, PodSeen, StoredSpec
from pdoperator.kube.port import Manifest

_ATTEMPT_SUFFIX = re.compile(r"-(\d+)$")
_MESSAGE_LIMIT = 1024
_LOG_TAIL = 4096
"""Bytes the kubelet keeps of a termination message at most."""


def seconds(text: str | None) -> float:
    """RFC 3339 to Unix seconds; 0 for none or nonsense."""
    try:
        return parse_timestamp(text) if text else 0.0
    except ValueError:
        return 0.0


def cluster_object(manifest: Manifest) -> ClusterObject:
    """The PDCluster; a spec that does not parse is kept raw with the reason."""
    meta = manifest["metadata"]
    raw = manifest.get("spec") or {}
    spec: PDClusterSpec | None = None
    problem = ""
    try:
        spec = PDClusterSpec.model_validate(raw)
    except ValidationError as error:
        problem = _short(error)
    return ClusterObject(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=int(meta.get("generation") or 0),
        raw_spec=raw,
        spec=spec,
        spec_error=problem,
        status=manifest.get("status") or {},
        deleting=bool(meta.get("deletionTimestamp")),
    )


def _short(error: ValidationError) -> str:
    """Where and what, one finding a clause: `prefill.replicas: Input should be …`."""
    found = [f"spec.{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors(include_url=False)]
    return "; ".join(found)[:_MESSAGE_LIMIT]


def pod_seen(manifest: Manifest) -> PodSeen:
    """One of our pods."""
    meta, spec, status = manifest["metadata"], manifest.get("spec") or {}, manifest.get("status") or {}
    labels = meta.get("labels") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    gate = conditions.get(GATE_KV_WIRED) or {}
    scheduled = conditions.get("PodScheduled") or {}
    return PodSeen(
        name=meta["name"],
        uid=meta["uid"],
        role=labels.get(LABEL_ROLE, ""),
        replica=_int(labels.get(LABEL_REPLICA)),
        revision=labels.get(LABEL_REVISION, ""),
        attempt=_attempt(meta),
        phase=status.get("phase") or "Pending",
        deleting=bool(meta.get("deletionTimestamp")),
        node=spec.get("nodeName") or "",
        ip=status.get("podIP") or "",
        ready=_true(conditions.get("Ready")),
        containers_ready=_true(conditions.get("ContainersReady")),
        scheduled=bool(spec.get("nodeName")) or _true(scheduled),
        unschedulable_message=(scheduled.get("message") or "") if scheduled.get("status") == "False" else "",
        kv_wired=gate.get("status") or "",
        kv_wired_since=seconds(gate.get("lastTransitionTime")),
        gate_reason=gate.get("reason") or "",
        created=seconds(meta.get("creationTimestamp")),
        containers=tuple(
            _container(c) for part in ("initContainerStatuses", "containerStatuses") for c in status.get(part) or []
        ),
        grace_seconds=int(spec.get("terminationGracePeriodSeconds") or 30),
    )


def _container(status: dict[str, Any]) -> ContainerSeen:
    state = status.get("state") or {}
    waiting = state.get("waiting") or {}
    # A container that ended for good (restartPolicy Never) tells its exit in `state`, one that was
    # restarted in `lastState`.
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    return ContainerSeen(
        name=status.get("name") or "",
        ready=bool(status.get("ready")),
        running="running" in state,
        started=seconds((state.get("running") or {}).get("startedAt")),
        waiting_reason=waiting.get("reason") or "",
        waiting_message=(waiting.get("message") or "")[:_MESSAGE_LIMIT],
        restarts=int(status.get("restartCount") or 0),
        last_exit_code=ended.get("exitCode"),
        last_exit_reason=ended.get("reason") or "",
        last_exit_message=(ended.get("message") or "")[-_LOG_TAIL:],
    )


def pod_warnings(events: list[Manifest]) -> tuple[tuple[str, str], ...]:
    """(reason, message) of Warning events, newest first."""

    def last(event: Manifest) -> float:
        series = event.get("series") or {}
        told = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
        return max((seconds(t) for t in told), default=0.0)

    found = [e for e in events if e.get("type") == "Warning"]
    return tuple(
        (str(e.get("reason") or ""), str(e.get("message") or "")[:_MESSAGE_LIMIT])
        for e in sorted(found, key=last, reverse=True)[:8]
    )


def node_offer(manifest: Manifest) -> NodeOffer | None:
    """A node's extended resources (names with a domain); None for a cordoned or not ready node."""
    if (manifest.get("spec") or {}).get("unschedulable"):
        return None
    status = manifest.get("status") or {}
    ready = next((c for c in status.get("conditions") or [] if c.get("type") == "Ready"), None)
    if ready is not None and ready.get("status") != "True":
        return None
    offered: dict[str, int] = {}
    for name, quantity in (status.get("allocatable") or {}).items():
        # Extended resources are whole numbers; the native ones carry units and are not asked for here.
        if "/" in name and re.fullmatch(r"\d+k?", str(quantity)):
            text = str(quantity)
            offered[name] = int(text[:-1]) * 1000 if text.endswith("k") else int(text)
    return NodeOffer(name=manifest["metadata"]["name"], allocatable=offered)


def stored_spec(manifest: Manifest) -> StoredSpec:
    """A ControllerRevision of ours. What can not be read in it fails later, as a spec that does not parse."""
    data = manifest.get("data")
    raw = data.get("spec") if isinstance(data, dict) else None
    number = manifest.get("revision")
    return StoredSpec(
        name=manifest["metadata"]["name"],
        number=number if isinstance(number, int) else 0,
        raw=raw if isinstance(raw, dict) else {},
    )


def owned_by(manifest: Manifest, uid: str) -> bool:
    """True when an owner reference names this UID (a label alone can be written by anyone)."""
    return any(o.get("uid") == uid for o in manifest["metadata"].get("ownerReferences") or [])


def _attempt(meta: dict[str, Any]) -> int:
    """From the annotation that domain.pods writes; the name's last number says the same."""
    text = (meta.get("annotations") or {}).get(ANNOTATION_ATTEMPT)
    found = _ATTEMPT_SUFFIX.search(meta["name"])
    return _int(text) if text else int(found[1]) if found else 0


def _true(condition: dict[str, Any] | None) -> bool:
    return bool(condition) and (condition or {}).get("status") == "True"


def _int(text: str | None) -> int:
    try:
        return int(text or 0)
    except ValueError:
        return 0
