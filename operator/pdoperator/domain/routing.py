"""What each router pod shall list: the pods that are ready, each with its island."""

from __future__ import annotations

from collections.abc import Iterable

from pdoperator.api import names
from pdoperator.domain.actions import DesiredWorker, SetWorkers
from pdoperator.domain.observed import Observed, PodSeen, RouterPodSeen
from pdtransfer.contract.base import Role


def worker_url(ip: str) -> str:
    """Engine address as routers list it (IPv6 in brackets)."""
    host = f"[{ip}]" if ":" in ip else ip
    return f"http://{host}:{names.PORT_ENGINE_HTTP}"


def desired_workers(pods: Iterable[PodSeen], ready: frozenset[str], island: dict[str, str]) -> list[DesiredWorker]:
    """Workers for pods whose UID is in `ready`. A pod whose island is not known now (it can't be
    reached, and this operator has just started) has an empty pairing_protocol: what a router lists
    of it stays."""
    workers = []
    for pod in pods:
        if pod.uid not in ready or pod.deleting or not pod.containers_ready or not pod.ip:
            continue
        workers.append(
            DesiredWorker(
                url=worker_url(pod.ip),
                worker_type=pod.role,
                bootstrap_port=names.PORT_BOOTSTRAP if pod.role == Role.PREFILL.value else None,
                pairing_protocol=island.get(pod.uid, ""),
            )
        )
    return sorted(workers, key=lambda w: (w.worker_type, w.url))


def reconcile_router(router: RouterPodSeen, wanted: list[DesiredWorker]) -> SetWorkers | None:
    """The difference between what a router lists and what it shall list; None where there is none.

    A worker that changed is removed first and added at a later look: while the router still
    removes a URL it refuses to add it. What it is removing is not removed again."""
    if router.workers is None or router.pod.deleting:
        return None
    by_url = {w.url: w for w in wanted}
    remove: list[str] = []
    listed: set[str] = set()
    for worker in router.workers:
        listed.add(worker.url)
        if worker.draining:
            # Left to the router. It was measured with smg 1.13: a second removal drops it at once, and the first one,
            # when its 5 s are over, takes away whatever has been added at this URL meanwhile.
            continue
        want = by_url.get(worker.url)
        same = (
            want is not None
            and worker.worker_type == want.worker_type
            and want.pairing_protocol in ("", worker.pairing_protocol)
            and (want.bootstrap_port is None or worker.bootstrap_port == want.bootstrap_port)
        )
        if not same:
            remove.append(worker.id)
    add = tuple(w for w in wanted if w.url not in listed and w.pairing_protocol)
    if not add and not remove:
        return None
    return SetWorkers(router.pod.name, router.pod.ip, add, tuple(sorted(remove)))


def route(observed: Observed, wanted: list[DesiredWorker]) -> list[SetWorkers]:
    """Changes for every router pod that answered."""
    changes = (reconcile_router(r, wanted) for r in observed.routers)
    return [c for c in changes if c is not None]


def listed_urls(observed: Observed) -> frozenset[str]:
    """URLs that at least one router lists, those it is removing included: they may have requests under way."""
    return frozenset(w.url for r in observed.routers if r.workers for w in r.workers)


def listed_everywhere(observed: Observed) -> frozenset[str]:
    """URLs that every answering router sends requests to; empty when none answered."""
    lists = [frozenset(w.url for w in r.workers if w.serves) for r in observed.routers if r.workers is not None]
    return frozenset.intersection(*lists) if lists else frozenset()
