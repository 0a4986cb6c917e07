"""What `kubectl describe` says to somebody who is paged: no rollout where nothing rolls, the role that is at fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_makers import quickstart
from domain_told import told, told_of
from domain_world import World, ready_world

from pdoperator.domain.links import LinkState, links_of
from pdoperator.domain.view import look
from pdtransfer.contract.base import Role


def test_a_first_launch_is_a_launch_and_no_rollout() -> None:
    w = World(quickstart())
    w.step()
    assert told(w, "Progressing") == (
        "True",
        "Launching",
        "3 pods being launched; ready: 0 of 1 prefill, 0 of 2 decode",
    )


def test_a_pod_that_somebody_deleted_is_launched_again_and_rolls_nothing() -> None:
    w = ready_world()
    del w.pods[w.side(Role.PREFILL)[0].uid]
    w.step()
    status, reason, message = told(w, "Progressing")
    assert (status, reason) == ("True", "Launching")
    assert message == "1 pod being launched; ready: 0 of 1 prefill, 0 of 2 decode"


def test_a_rollout_counts_what_still_runs_at_the_older_revision() -> None:
    w = ready_world()
    w.edit(quickstart(engine__image="pd:2"))
    w.step()
    status, reason, message = told(w, "Progressing")
    assert (status, reason) == ("True", "Rolling")
    assert message.startswith("3 replicas to bring to the current revision")


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ((Role.PREFILL,), "prefill and decode have not become ready within 600 s (see PrefillReady and DecodeReady)"),
        ((), ""),
    ],
)
def test_what_has_not_become_ready_in_time_names_every_role_that_has_not(late: tuple[Role, ...], message: str) -> None:
    """A prefill that waits for decode is no more at fault than decode: both are named."""
    w = World(quickstart())
    w.step()
    for role in late:
        for pod in w.side(role):
            pod.engine = "slow"
    for _ in range(4):
        w.step()
    w.step(601.0)
    w.step()
    if message:
        assert told(w, "Progressing") == ("False", "Blocked", message)
    else:
        assert told(w, "Progressing")[:2] == ("True", "Stable")


def test_one_decode_that_is_late_is_the_only_role_named() -> None:
    w = World(quickstart())
    w.step()
    w.side(Role.DECODE)[1].engine = "slow"
    for _ in range(6):
        w.step()
    w.step(601.0)
    w.step()
    assert told(w, "Progressing")[2] == "decode has not become ready within 600 s (see DecodeReady)"


def test_a_router_without_a_pod_says_where_to_look() -> None:
    w = ready_world()
    seen = w.observe()
    status, reason, message = told_of(w, replace(seen, routers=()), "RouterReady")
    assert (status, reason) == ("False", "RouterStarting")
    assert "Deployment quickstart-router" in message
    (one,) = seen.routers
    starting = replace(one, pod=replace(one.pod, ready=False), workers=None)
    status, reason, message = told_of(w, replace(seen, routers=(starting,)), "RouterReady")
    assert (status, reason) == ("False", "RouterStarting")
    assert f"kubectl describe pod {one.pod.name}" in message


def test_a_verdict_without_words_ends_with_its_reason() -> None:
    w = ready_world()
    prefill, decode = w.side(Role.PREFILL)[0], w.side(Role.DECODE)[0]
    w.cut.add(frozenset((prefill.uid, decode.uid)))
    seen = w.observe()
    link = links_of(seen, look(seen, False), frozenset())[prefill.uid, decode.uid]
    assert (link.state, link.message) == (LinkState.UNREACHABLE, "PeerUnreachable")
