"""A rank that failed says so over an open connection: the sidecar shows it until the process ends or starts again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sidecar_kit import CLUSTER, POD, FakeEndpoint, card, ranks, running, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.link import Failed, Hello
from pdtransfer.sidecar import model as m
from pdtransfer.sidecar import state as st
from pdtransfer.sidecar import views
from pdtransfer.sidecar.rank_link import MAX_REASON, RankLink

EMPTY = m.PodState(identity=m.Identity(cluster_uid=CLUSTER, pod_uid=POD, role=Role.PREFILL))


def shown(state: m.PodState) -> dict[int, str]:
    return {f.rank: f.message for f in views.pod_cards(state, 0.0).failed}


def hello(state: m.PodState, conn: int, rank: int, incarnation: str = "i1") -> m.PodState:
    return st.hello(state, conn, Hello(card=card(rank, incarnation=incarnation), expected_ranks=2), 0.0)[0]


def says(state: m.PodState, conn: int, rank: int = 0, incarnation: str = "i1", why: str = "broken") -> m.PodState:
    return st.failed(state, conn, Failed(rank=rank, incarnation=incarnation, message=why), 0.0)[0]


def test_a_failed_rank_has_no_card_and_the_pod_is_not_ready() -> None:
    state = says(hello(hello(EMPTY, 1, 0), 2, 1), 3)
    state = st.closed(state, 1)
    assert shown(state) == {0: "broken"} and [r.rank for r in state.ranks] == [1]
    assert "rank 0 failed: broken" in views.readiness(state, 0.0, True).missing
    assert "rank 0 failed: broken" in views.readiness(state, 0.0, False).missing


def test_on_the_connection_of_its_card_it_takes_the_cards_place() -> None:
    state = says(hello(EMPTY, 1, 0), 1)
    assert shown(state) == {0: "broken"} and state.ranks == ()


def test_it_stands_while_the_connection_is_open() -> None:
    before = says(hello(EMPTY, 1, 0), 1)
    after = st.closed(before, 1)
    assert shown(after) == {} and after.revision > before.revision


def test_another_incarnation_is_not_what_failed() -> None:
    state = says(hello(EMPTY, 1, 0), 1)
    state = hello(state, 2, 0, "i2")
    assert shown(state) == {}  # the process of i1 may still be there
    state, effects = st.failed(state, 3, Failed(rank=0, incarnation="i1", message="late"), 0.0)
    assert shown(state) == {} and [type(e) for e in effects] == [m.Send, m.Close]
    assert state.refused[-1].reason == "OldIncarnation" and not state.knows(3)


def test_one_that_failed_before_it_showed_a_card_is_shown_too() -> None:
    assert shown(says(EMPTY, 1)) == {0: "broken"}


async def test_a_rank_tells_why_it_failed_and_its_end_ends_that(tmp_path: Path) -> None:
    async with running(tmp_path) as sidecar:
        endpoint = FakeEndpoint(card(0, tp_size=1))
        link = RankLink(tmp_path / "s.sock", endpoint, 1).start()
        await ranks(sidecar, (0, "i1"))
        endpoint.changed(failed=RuntimeError("thread x ended:\n" + "y" * 5000))
        await until(lambda: shown(sidecar.hub.state))
        told = shown(sidecar.hub.state)[0]
        assert told.startswith("thread x ended: y") and len(told) == MAX_REASON
        await ranks(sidecar)
        revision = sidecar.hub.state.revision
        endpoint.changed()  # more news of a failed endpoint are no news
        await asyncio.sleep(0.3)
        assert sidecar.hub.state.revision == revision and link.failed is None
        link.stop()
        await until(lambda: not shown(sidecar.hub.state))


async def test_a_sidecar_that_starts_anew_hears_it_as_well(tmp_path: Path) -> None:
    endpoint = FakeEndpoint(card(0, tp_size=1))
    endpoint.changed(failed=RuntimeError("broken"))
    link = RankLink(tmp_path / "s.sock", endpoint, 1).start()
    for _ in range(2):
        async with running(tmp_path) as sidecar:
            await until(lambda held=sidecar: shown(held.hub.state) == {0: "broken"})
    link.stop()
