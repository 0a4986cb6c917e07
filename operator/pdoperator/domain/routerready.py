"""RouterReady: does each router send requests to a prefill-decode pair, and where not, what stands in the way?"""

from __future__ import annotations

from pdoperator.api import names
from pdoperator.api.conditions import ConditionType, Reason
from pdoperator.api.spec import RouterType
from pdoperator.domain.condition import Aspect, no, unknown, yes
from pdoperator.domain.observed import RouterPodSeen
from pdoperator.domain.picture import Picture
from pdoperator.domain.poddiagnosis import worst
from pdoperator.domain.routing import worker_url
from pdoperator.domain.words import count
from pdtransfer.contract.base import Role

_SHOWN = 4


def router_ready(pic: Picture) -> Aspect:
    """Does a router list a pair that can serve?"""
    kind = ConditionType.ROUTER_READY
    if pic.spec is None:
        listing = [r for r in pic.observed.routers if r.workers]
        if listing:
            return yes(kind, Reason.ROUTER_READY, f"{count(len(listing), 'router pod')} listing workers")
        return unknown(kind, Reason.NOT_OBSERVED_YET, "the spec can not be read", required=False)
    if pic.spec.router.type is RouterType.NONE or pic.spec.router.replicas == 0:
        return yes(kind, Reason.NOT_REQUIRED, "no router is asked for", required=False)
    if pic.spec.router.type is RouterType.INFERENCE_POOL:
        return unknown(
            kind,
            Reason.NOT_IMPLEMENTED_YET,
            f"the InferencePool is not made yet; create one that selects {names.LABEL_CLUSTER_UID}="
            f"{pic.observed.cluster.uid}",
            required=False,
        )
    live = [r for r in pic.observed.routers if not r.pod.deleting]
    if not live and not pic.may_launch:
        return no(kind, Reason.NOT_LAUNCHED, "nothing is launched, see Compatible")
    if not any(r.pod.ready for r in live):
        found = worst([r.pod for r in live], frozenset(), {}, False, pic.observed.now)
        if found and found[0] in (
            Reason.CANNOT_SCHEDULE,
            Reason.CANNOT_PULL_IMAGE,
            Reason.CANNOT_START,
            Reason.CANNOT_MOUNT_VOLUME,
            Reason.CRASHING,
        ):
            return no(kind, found[0], found[1])
        return no(kind, Reason.ROUTER_STARTING, _not_up(pic, [r.pod.name for r in live]))
    answering = [r for r in live if r.workers is not None]
    if not answering:
        silent = next(r for r in live if r.pod.ready)
        return no(
            kind,
            Reason.ROUTER_UNREACHABLE,
            f"the operator can not set the workers of {silent.pod.name}: {silent.error or 'no answer'}",
        )
    for r in answering:
        missing = _no_pair(pic, r)
        if missing:
            return no(
                kind,
                Reason.ROUTER_HAS_NO_PAIR,
                f"{r.pod.name} lists no healthy prefill-decode pair of one island: {missing}",
            )
    return yes(
        kind,
        Reason.ROUTER_READY,
        f"{count(len(answering), 'router pod')} listing {count(len(pic.workers), 'worker')}; send requests to "
        f"http://{names.router_name(pic.observed.cluster.name)}.{pic.observed.cluster.namespace}:{names.PORT_ROUTER_HTTP}",
    )


def _not_up(pic: Picture, pods: list[str]) -> str:
    if pods:
        return f"no router pod is ready yet: see kubectl describe pod {min(pods)} if this stays"
    deployment = names.router_name(pic.observed.cluster.name)
    return (
        f"no router pod exists yet: see the events of Deployment {deployment} and of its ReplicaSet if this stays (a "
        "quota or an admission webhook may refuse its pods)"
    )


def _no_pair(pic: Picture, router: RouterPodSeen) -> str:
    """Why this router can serve nobody; '' where it can."""
    wanted = {w.url: w for w in pic.workers}
    listed = {w.url: w for w in router.workers or ()}
    sides: dict[str, set[str]] = {}
    for worker in router.workers or ():
        if worker.serves and worker.url in wanted:
            sides.setdefault(worker.pairing_protocol, set()).add(worker.worker_type)
    if any({role.value for role in Role} <= side for side in sides.values()):
        return ""
    named = {worker_url(p.ip): p.name for p in pic.pods if p.ip}
    told = []
    for role in Role:
        ours = [w for w in pic.workers if w.worker_type == role.value]
        if not ours:
            told.append(f"no {role.value} pod is ready for requests")
        for w in ours:
            found = listed.get(w.url)
            name = named.get(w.url, w.url)
            if found is None:
                told.append(f"{name} is not listed yet")
            elif found.draining:
                told.append(f"{name} is being taken off and is added again when that is done (about 5 s)")
            elif not found.healthy:
                told.append(f"{name} does not answer the router's health checks in time (see its engine's log)")
            elif found.pairing_protocol != w.pairing_protocol and w.pairing_protocol:
                told.append(f"{name} is listed with another island and is taken off to be added anew")
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return ("; ".join(told[:_SHOWN]) or "prefill and decode are of different islands") + more
