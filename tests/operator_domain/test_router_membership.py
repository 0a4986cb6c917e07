"""A router that needs 5 s to let a worker go: Ready comes once and stays, and what is missing is told by name."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from domain_makers import quickstart
from domain_world import World

from pdoperator.domain.actions import DesiredWorker, SetWorkers
from pdoperator.domain.decide import decide
from pdoperator.domain.observed import Observed, PodSeen, RouterPodSeen, Worker
from pdoperator.domain.routing import listed_everywhere, listed_urls, reconcile_router
from pdtransfer.contract.base import Role

DRAIN = 5.0


@dataclass
class Removal:
    """One accepted removal: at `due` whatever is listed at `url` goes."""

    url: str
    due: float


class SlowRouter(World):
    """Its router does what smg 1.13 was seen to do: it drains for 5 s, drops a draining worker at once when its removal
    is asked for again, and at the end of each removal drops what is listed at that URL by then."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__(raw)
        self.removals: list[Removal] = []
        self.asked: list[str] = []

    def observe(self, *, term: int | None = None) -> Observed:
        for removal in [r for r in self.removals if r.due <= self.now]:
            self.removals.remove(removal)
            self.workers.pop(removal.url, None)
        return super().observe(term=term)

    def set_workers(self, a: SetWorkers) -> None:
        for url in a.remove:
            self.asked.append(url)
            worker = self.workers.get(url)
            if worker is None:
                continue
            if worker.draining:
                del self.workers[url]
                continue
            self.workers[url] = replace(worker, healthy=False, draining=True)
            self.removals.append(Removal(url, self.now + DRAIN))
        for w in a.add:
            if w.url not in self.workers:  # else 409
                self.workers[w.url] = Worker(w.url, w.url, w.worker_type, w.bootstrap_port, w.pairing_protocol, True)


def after_a_blip(w: SlowRouter) -> list[tuple[str, str]]:
    """Ready at each look of half a second, from the look on at which decode is not ready for one and a half seconds."""
    decode = w.side(Role.DECODE)[0]
    seen = []
    for look in range(40):
        decode.engine = "slow" if look < 3 else "up"
        w.step(0.5)
        ready = w.condition("Ready")
        seen.append((ready["status"], ready["reason"]))
    return seen


def one_pair() -> SlowRouter:
    w = SlowRouter(quickstart(decode__replicas=1))
    w.run()
    assert w.condition("Ready")["status"] == "True"
    return w


def test_a_pair_that_is_wired_again_while_the_router_lets_it_go_becomes_ready_once() -> None:
    w = one_pair()
    seen = after_a_blip(w)
    assert seen[0][0] == "False"  # the fault happened
    assert ("False", "RouterHasNoPair") in seen  # and is told while the router can serve nobody
    turned = [now[0] for before, now in itertools.pairwise(seen) if before[0] != now[0]]
    assert turned == ["True"]
    # Down for the drain's 5 s and the look that adds the pair again, not longer.
    assert sum(status == "False" for status, _ in seen) * 0.5 <= DRAIN + 1.0
    assert sorted(w.asked) == sorted(set(w.asked)), "a removal was asked for twice"


def test_the_slow_router_itself_shows_the_flap_when_a_removal_is_asked_for_twice() -> None:
    """Negative control: the double does to an impatient operator what smg did."""
    w = one_pair()
    (url, *_) = w.routed()
    w.set_workers(SetWorkers("r", "", remove=(url,)))
    w.set_workers(SetWorkers("r", "", remove=(url,)))
    assert url not in w.routed()
    w.step(0.5)
    assert url in w.routed()
    w.now += DRAIN
    w.observe()
    assert url not in w.routed()


def test_an_operator_that_starts_in_the_middle_of_a_removal_does_not_ask_again() -> None:
    w = one_pair()
    w.side(Role.DECODE)[0].engine = "slow"
    w.step(0.5)
    asked = list(w.asked)
    assert asked
    w.restart_operator()
    for _ in range(4):
        w.step(0.5)
    assert w.asked == asked


def router(*workers: Worker) -> RouterPodSeen:
    pod = PodSeen(
        name="r", uid="r", role="router", replica=0, revision="", attempt=0, phase="Running", deleting=False, node="n",
        ip="10.9.9.9", ready=True, containers_ready=True, scheduled=True, unschedulable_message="", kv_wired="",
        kv_wired_since=0.0, created=0.0,
    )  # fmt: skip
    return RouterPodSeen(pod, workers)


def test_what_a_router_is_removing_is_neither_removed_nor_added_and_is_no_worker_that_serves() -> None:
    url = "http://10.0.0.1:30000"
    wanted = [DesiredWorker(url, "decode", None, "i")]
    listed = router(Worker("id", url, "decode", None, "i", True))
    leaving = router(Worker("id", url, "decode", None, "i", True, draining=True))
    assert reconcile_router(listed, []) == SetWorkers("r", "10.9.9.9", (), ("id",))
    assert reconcile_router(leaving, []) is None
    assert reconcile_router(leaving, wanted) is None
    assert reconcile_router(router(), wanted) == SetWorkers("r", "10.9.9.9", tuple(wanted), ())
    seen = replace(one_pair().observe(), routers=(leaving,))
    assert listed_everywhere(seen) == frozenset()
    assert listed_urls(seen) == {url}  # its pod is not deleted yet: it may have requests under way


DECODE, PREFILL = Role.DECODE, Role.PREFILL


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "{decode} is not listed yet"),
        ({"draining": True, "healthy": False}, "{decode} is being taken off and is added again when that is done"),
        ({"healthy": False}, "{decode} does not answer the router's health checks in time (see its engine's log)"),
        ({"pairing_protocol": "other"}, "{decode} is listed with another island and is taken off to be added anew"),
    ],
)
def test_a_router_without_a_pair_names_the_pod_and_why(change: dict[str, Any] | None, says: str) -> None:
    w = one_pair()
    decode = w.side(DECODE)[0]
    seen = w.observe()
    (one,) = seen.routers
    workers = [x for x in one.workers or () if x.worker_type == "prefill"]
    theirs = next(x for x in one.workers or () if x.worker_type == "decode")
    if change is not None:
        workers.append(replace(theirs, **change))
    status = decide(replace(seen, routers=(replace(one, workers=tuple(workers)),)), w.memory, w.settings).status
    assert status is not None
    for kind in ("RouterReady", "Ready"):
        told = next(c for c in status["conditions"] if c["type"] == kind)
        assert (told["status"], told["reason"]) == ("False", "RouterHasNoPair")
        assert says.format(decode=decode.name) in told["message"]
        assert w.side(PREFILL)[0].name not in told["message"]  # nothing is wrong with it


def test_a_router_with_no_pod_to_list_says_so() -> None:
    w = World(quickstart())
    for _ in range(3):
        w.step()
        for pod in w.pods.values():
            pod.engine = "loading"
    message = w.condition("RouterReady")["message"]
    assert message.endswith("no prefill pod is ready for requests; no decode pod is ready for requests")
