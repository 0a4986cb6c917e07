"""A rank that lives and says that it can move no KV any more (SGLang's /health stays green): its pod is replaced."""

from __future__ import annotations

import itertools
from typing import Any

from domain_makers import quickstart
from domain_world import World

from pdoperator.domain.actions import DeletePod
from pdoperator.domain.settings import DecideSettings
from pdtransfer.contract.base import Role

SETTINGS = DecideSettings()
WHY = "the endpoint failed: thread pdcluster-hears-decode ended: KeyError: 'lost'"


def ready(**changes: Any) -> World:
    world = World(quickstart(prefill__replicas=2, **changes))
    world.run()
    assert world.condition("Ready")["status"] == "True"
    return world


def run_until_deleted(world: World, limit: int = 60) -> list[tuple[float, DeletePod]]:
    for _ in range(limit):
        decision = world.step()
        found = [(world.now, a) for a in decision.actions if isinstance(a, DeletePod)]
        if found:
            return found
    return []


def test_a_rank_that_says_it_failed_is_named_at_once_and_its_pod_replaced_soon() -> None:
    world = ready()
    lame = world.side(Role.PREFILL)[0]
    lame.failed = WHY
    began = world.now
    world.step()
    told = world.condition("PrefillReady")
    assert (told["status"], told["reason"]) == ("False", "RankFailed")
    assert lame.name in told["message"] and WHY in told["message"]
    assert world.condition("PeersWired")["reason"] == "RankFailed"
    assert ("Warning", "RankFailed") in {(e.type, e.reason) for e in world.events}
    assert lame.gate == "False" and f"http://{lame.ip}:30000" not in world.routed()
    ((at, deleted),) = run_until_deleted(world)
    assert (deleted.uid, deleted.reason) == (lame.uid, "Recycled") and WHY in deleted.message
    assert SETTINGS.failed_limit_seconds <= at - began <= SETTINGS.failed_limit_seconds + 3
    (event,) = [e for e in world.events if e.reason == "Recycled"]
    assert event.type == "Warning" and WHY in event.message
    for _ in range(60):
        world.step()
    assert len(world.side(Role.PREFILL)) == 2 and lame.uid not in world.pods
    assert world.condition("Ready")["status"] == "True"


def test_the_other_prefill_serves_meanwhile() -> None:
    world = ready()
    lame, other = world.side(Role.PREFILL)
    lame.failed = WHY
    for _ in range(60):
        world.step()
        assert other.gate == "True" and any(other.ip in url for url in world.routed())


def test_an_engine_that_starts_again_by_itself_is_left_alone() -> None:
    """Reference, and SGLang without an operator, end when a rank fails; the kubelet starts them again."""
    world = ready()
    lame = world.side(Role.PREFILL)[0]
    lame.failed = WHY
    for _ in range(5):
        world.step()
    lame.failed, lame.engine = "", "loading"
    world.restart_rank(lame)
    assert run_until_deleted(world, 120) == []
    assert world.condition("Ready")["status"] == "True"


def test_a_new_start_that_fails_again_has_its_own_time() -> None:
    world = ready()
    lame = world.side(Role.PREFILL)[0]
    lame.failed = WHY
    for _ in range(8):
        world.step()
    world.restart_rank(lame)
    again = world.now
    ((at, _),) = run_until_deleted(world)
    assert at - again >= SETTINGS.failed_limit_seconds


def test_a_rank_that_is_only_gone_replaces_nobody() -> None:
    """Control: no card and no word (an engine that gave its memory back for a while) is no failure."""
    world = ready()
    lame = world.side(Role.PREFILL)[0]
    lame.tp += 1  # one rank more is expected than shows a card
    lame.roster = None
    answers = world.observe().answers[lame.uid].cards
    assert answers is not None
    world.pods[lame.uid].engine = "up"
    assert run_until_deleted(world, 120) == []


def test_pods_that_fail_again_and_again_are_replaced_with_growing_pauses() -> None:
    world = ready()
    times: list[float] = []
    for _ in range(400):
        for pod in world.side(Role.PREFILL):
            pod.failed = WHY if pod.replica == 0 and pod.engine == "up" else ""
        times += [world.now for a in world.step().actions if isinstance(a, DeletePod)]
    assert 4 <= len(times) <= 6
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert all(b - a >= 5 for a, b in itertools.pairwise(pauses)), pauses


def test_an_operator_that_starts_anew_replaces_it_too() -> None:
    world = ready()
    lame = world.side(Role.DECODE)[0]
    lame.failed = WHY
    for _ in range(5):
        world.step()
    world.restart_operator()
    ((_, deleted),) = run_until_deleted(world)
    assert deleted.uid == lame.uid


def test_what_a_rank_says_is_shown_on_one_line_and_bounded() -> None:
    world = ready()
    lame = world.side(Role.PREFILL)[0]
    lame.failed = "line one\nline two\x1b[31m " + "x" * 5000
    world.step()
    message = world.condition("PrefillReady")["message"]
    assert "\n" not in message and "\x1b" not in message and len(message) < 1000
