"""What to write so that every child but engine pods is there: Secrets, Services, the router, policies."""

from __future__ import annotations

from typing import Any

from pdoperator.api import names
from pdoperator.api.conditions import Reason
from pdoperator.api.spec import PDClusterSpec, RouterType
from pdoperator.domain.actions import Action, Apply, Delete, IssueCertificate, WriteRouterKey
from pdoperator.domain.children import applied_hash, wanted_children
from pdoperator.domain.containers import wants_sidecar
from pdoperator.domain.observed import Observed
from pdoperator.domain.picture import Picture
from pdoperator.domain.settings import DecideSettings


def keep_children(
    pic: Picture, extra: dict[str, Any], learned: dict[str, Any], settings: DecideSettings
) -> list[Action]:
    """Secrets, Services, the router, policies: applied where missing or changed."""
    observed, spec = pic.observed, pic.spec
    cluster = observed.cluster
    actions: list[Action] = []
    end = observed.certificate_not_after
    needed = (spec is not None and pic.may_launch and wants_sidecar(spec)) or (pic.managed and bool(pic.pods))
    ending = end is None or end - observed.now < settings.certificate_renew_before_seconds
    # A pod with a certificate that is not ours: somebody overwrote the Secret, which the operator may not read.
    foreign = any(a.error == Reason.WRONG_CERTIFICATE for a in observed.answers.values())
    # A pod that waits for a Secret which is gone: only its events tell.
    secret = names.tls_secret_name(cluster.name)
    missing = any(reason == "FailedMount" and secret in text for p in pic.pods for reason, text in p.warnings or ())
    rewritten = extra.get("certificate_rewritten", 0.0)
    overdue = (foreign or missing) and observed.now - rewritten >= settings.certificate_rewrite_seconds
    if needed and (ending or overdue):
        # Also where the spec does not fit: what runs must not be unwired by an expired certificate.
        if foreign or missing:
            learned["certificate_rewritten"] = observed.now
        actions.append(IssueCertificate(secret, names.pod_server_name(cluster.uid)))
    if spec is None or not pic.may_launch:
        return actions
    router_wanted = spec.router.type is RouterType.SMG
    keyless = any(c.waiting_reason == "CreateContainerConfigError" for r in observed.routers for c in r.pod.containers)
    if router_wanted and (observed.router_deployment is None or keyless):
        actions.append(WriteRouterKey(names.router_key_secret_name(cluster.name)))
    before: dict[str, str] = extra.get("applied", {})
    applied: dict[str, str] = {}
    for manifest in wanted_children(cluster, spec, settings):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        key, mark = f"{kind}/{name}", applied_hash(manifest)
        if observed.children is not None:
            current = observed.children.get(key) == mark
        elif kind == "Deployment":
            current = applied_hash(observed.router_deployment) == mark
        elif kind == "Service":
            current = name in observed.services and before.get(key, mark) == mark
        else:
            current = before.get(key) == mark
        if not current:
            actions.append(Apply(manifest))
        applied[key] = mark
    learned["applied"] = applied
    actions += _unwanted(observed, spec, applied)
    return actions


_API = {
    "Deployment": "apps/v1",
    "Service": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
}


def _unwanted(observed: Observed, spec: PDClusterSpec, wanted: dict[str, str]) -> list[Action]:
    """A router that is not asked for any more, and policies that were switched off. `wanted`: `Kind/name`."""
    router = names.router_name(observed.cluster.name)
    there = set(observed.children or ())
    if observed.router_deployment is not None and spec.router.type is not RouterType.SMG:
        there |= {f"Deployment/{router}", f"Service/{router}"}
    gone = (key.partition("/") for key in sorted(there - set(wanted)))
    return [Delete(_API[kind], kind, name) for kind, _, name in gone if kind in _API]
