"""PeerReplaced: told for every engine that started again, also where the operator was away or died meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from domain_world import World, ready_world

from pdoperator.domain.actions import EmitEvent, Memory
from pdoperator.domain.decide import decide
from pdtransfer.contract.base import Role


def replaced(w: World) -> list[str]:
    """Messages of the events that were told."""
    return [e.message for e in w.events if e.reason == "PeerReplaced"]


def test_it_is_told_once_where_the_operator_saw_both_starts() -> None:
    w = ready_world()
    decode = w.side(Role.DECODE)[1]
    w.restart_rank(decode)
    w.run()
    assert replaced(w) == [
        f"{decode.name} started again (incarnation i0 is now {decode.incarnation}); its peers are wired to the new one"
    ]


def test_it_is_told_once_where_the_engine_started_again_while_no_operator_ran() -> None:
    w = ready_world()
    decode = w.side(Role.DECODE)[1]
    w.restart_rank(decode)
    w.restart_operator()
    w.run()
    assert [m.partition(" ")[0] for m in replaced(w)] == [decode.name]


@pytest.mark.parametrize("loading", [1, 5])
def test_it_is_told_where_the_operator_starts_while_the_engine_still_loads(loading: int) -> None:
    w = ready_world()
    decode = w.side(Role.DECODE)[1]
    w.restart_rank(decode)
    decode.engine = "slow"
    w.step()
    w.restart_operator()
    for _ in range(loading):
        w.step()
    assert replaced(w) == []
    decode.engine = "up"
    w.run()
    assert len(replaced(w)) == 1


def test_an_operator_that_dies_before_it_wrote_the_status_tells_the_same_event_again() -> None:
    """The same words are the same Event object: nobody sees it twice."""
    w = ready_world()
    w.restart_rank(w.side(Role.DECODE)[0])
    first, again = (decide(w.observe(), memory, w.settings) for memory in (w.memory, Memory()))
    told = [[a for a in d.actions if isinstance(a, EmitEvent) and a.reason == "PeerReplaced"] for d in (first, again)]
    assert len(told[0]) == 1
    assert told[0] == told[1]


def test_a_status_that_was_written_is_enough_to_be_silent() -> None:
    w = ready_world()
    w.restart_rank(w.side(Role.DECODE)[0])
    w.run()
    for _ in range(3):
        w.restart_operator()
        w.run()
    assert len(replaced(w)) == 1


def test_a_pod_with_another_uid_is_a_new_pod_and_the_old_one_is_forgotten() -> None:
    w = ready_world()
    victim = w.side(Role.DECODE)[0]
    assert set(w.status["incarnations"]) == set(w.pods)
    del w.pods[victim.uid]
    w.restart_operator()
    w.run()
    assert replaced(w) == []
    assert set(w.status["incarnations"]) == set(w.pods)
    assert victim.uid not in w.status["incarnations"]


@pytest.mark.parametrize("kept", [None, {}, [], "text", {"u1": 3}, {"u1": None}])
def test_a_status_of_an_older_operator_or_one_that_somebody_edited_tells_nothing_and_is_put_right(kept: Any) -> None:
    w = ready_world()
    good = w.status["incarnations"]
    w.status = {**w.status, "incarnations": kept}
    w.step()
    assert replaced(w) == []
    assert w.status["incarnations"] == good


def test_an_incarnation_longer_than_status_takes_is_cut_and_its_next_start_is_told() -> None:
    w = ready_world()
    decode = w.side(Role.DECODE)[0]
    for first in ("a", "b"):
        decode.incarnation, decode.roster = first + "x" * 5000, None
        w.run()
    assert len(replaced(w)) == 2
    assert w.status["incarnations"][decode.uid] == "b" + "x" * 249
