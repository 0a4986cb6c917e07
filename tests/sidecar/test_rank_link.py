"""The ranks' end of the unix socket: it comes back, says what is wrong, and floods nobody."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

import pytest
from sidecar_kit import FakeEndpoint, card, give, peer, ranks, roster, running, until, verdict

from pdtransfer.sidecar import model, rank_link, views
from pdtransfer.sidecar.rank_link import RankLink


async def test_a_broken_seal_is_named_to_the_rank_the_cards_and_readyz(tmp_path: Path) -> None:
    broken = card(0).model_copy(update={"fingerprint": "f" * 32})
    endpoint = FakeEndpoint(broken)
    async with running(tmp_path) as sidecar:
        link = RankLink(tmp_path / "s.sock", endpoint, expected_ranks=1).start()
        try:
            await until(lambda: link.refused)
            assert link.refused is not None and link.refused.reason == "SealBroken"
            shown = views.pod_cards(sidecar.hub.state, sidecar.hub.clock())
            assert [(r.rank, r.reason) for r in shown.refused] == [(0, "SealBroken")] and not shown.cards
            text = views.readiness(sidecar.hub.state, sidecar.hub.clock(), True).text
            assert "rank 0 was refused: SealBroken: fingerprint" in text
            endpoint.card = card(0)  # repaired: the link asks again by itself
            await ranks(sidecar, (0, "i1"))
            await until(lambda: link.refused is None)
        finally:
            link.stop()


async def test_links_survive_a_sidecar_restart_and_the_roster_does_too(tmp_path: Path) -> None:
    ends = [FakeEndpoint(card(i), verdicts=(verdict(i, peer(i)),)) for i in range(2)]
    links = [RankLink(tmp_path / "s.sock", e, expected_ranks=2).start() for e in ends]
    try:
        async with running(tmp_path) as first:
            await ranks(first, (0, "i1"), (1, "i1"))
            assert give(first, roster((5, 1))) is None
            await until(lambda: all(len(e.applied) == 1 for e in ends))
        await until(lambda: not any(link.connected for link in links))
        async with running(tmp_path) as second:
            await ranks(second, (0, "i1"), (1, "i1"))
            # No operator was asked: ready again from the kept roster and the ranks' own verdicts.
            await until(lambda: views.readiness(second.hub.state, second.hub.clock(), True).ready)
            assert second.hub.state.key == roster((5, 1)).key
            await until(lambda: all(len(e.applied) == 2 for e in ends))
            assert ends[0].applied[1] == ends[0].applied[0] == (peer(0),)
        async with running(tmp_path, pod_uid="other-pod") as third:
            assert third.hub.state.roster is None
        (tmp_path / "s.state.json").write_text("{broken")
        async with running(tmp_path) as fourth:
            await ranks(fourth, (0, "i1"), (1, "i1"))
            assert fourth.hub.state.roster is None
        assert all(link.failed is None for link in links)
    finally:
        for link in links:
            link.stop()


async def test_an_endpoint_that_fails_on_its_peers_is_retried_and_named(tmp_path: Path) -> None:
    endpoint = FakeEndpoint(card(0), fail=RuntimeError("agent is gone"))
    link = RankLink(tmp_path / "s.sock", endpoint, expected_ranks=1).start()
    try:
        async with running(tmp_path) as sidecar:
            await ranks(sidecar, (0, "i1"))
            r = roster(peers={0: (peer(0),)})
            assert give(sidecar, r) is None
            await until(lambda: "agent is gone" in link.error)
            endpoint.fail = None
            await until(lambda: endpoint.applied == [(peer(0),)])
            assert link.failed is None
    finally:
        link.stop()


async def test_a_rank_whose_endpoint_died_withdraws_its_card(tmp_path: Path) -> None:
    endpoint = FakeEndpoint(card(0, tp_size=1))
    link = RankLink(tmp_path / "s.sock", endpoint, expected_ranks=1).start()
    try:
        async with running(tmp_path) as sidecar:
            await ranks(sidecar, (0, "i1"))
            endpoint.changed(failed=RuntimeError("progress thread ended"))
            await ranks(sidecar)
            assert "progress thread ended" in link.error and link.failed is None
            await asyncio.sleep(0.5)
            await ranks(sidecar)  # and it does not come back
    finally:
        link.stop()


async def test_whatever_restarts_the_end_state_is_the_newest_incarnation_with_its_roster(tmp_path: Path) -> None:
    """Sidecars and engines restart in a seeded order; at the end everything agrees, and keys only rose."""
    rng = random.Random(7)
    highest = (0, 0)
    engines = 0
    links: list[RankLink] = []
    ends: list[FakeEndpoint] = []

    def engine(incarnation: str) -> None:
        for link in links:
            link.stop()
        ends[:] = [FakeEndpoint(card(i, incarnation=incarnation)) for i in range(2)]
        links[:] = [RankLink(tmp_path / "s.sock", e, expected_ranks=2).start() for e in ends]

    try:
        engine("e0")
        for turn in range(8):
            async with running(tmp_path) as sidecar:
                for _ in range(rng.randint(1, 2)):
                    if rng.random() < 0.5:
                        engines += 1
                        await asyncio.to_thread(engine, f"e{engines}")
                    await ranks(sidecar, (0, f"e{engines}"), (1, f"e{engines}"))
                    held = (sidecar.hub.state.key.term, sidecar.hub.state.key.counter)
                    assert held >= highest, "a key went back"
                    highest = (turn, held[1] + 1) if turn > held[0] else (held[0], held[1] + 1)
                    assert give(sidecar, roster(highest, incarnation=f"e{engines}")) is None
                    stale = give(sidecar, roster((0, 0), incarnation=f"e{engines}"))
                    assert stale is not None and stale.reason == "LowerKey"
                    await until(lambda: all(e.applied and e.applied[-1] == (peer(i),) for i, e in enumerate(ends)))
        assert engines >= 2, "the seed restarts engines"
    finally:
        for link in links:
            link.stop()


async def test_a_changed_card_is_shown_again_on_the_same_connection(tmp_path: Path) -> None:
    endpoint = FakeEndpoint(card(0, tp_size=1))
    link = RankLink(tmp_path / "s.sock", endpoint, expected_ranks=1).start()
    try:
        async with running(tmp_path) as sidecar:
            await ranks(sidecar, (0, "i1"))
            conn = sidecar.hub.state.ranks[0].conn
            endpoint.changed(card=endpoint.card.model_copy(update={"agent_name": "second generation"}))
            await until(lambda: sidecar.hub.state.ranks[0].card.agent_name == "second generation")
            assert sidecar.hub.state.ranks[0].conn == conn
    finally:
        link.stop()


def test_the_link_ends_at_once_without_a_sidecar_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_link, "BACKOFF", (600.0, 600.0))  # it waits to try again, for minutes
    link = RankLink(tmp_path / "nothing.sock", FakeEndpoint(card(0)), expected_ranks=1).start()
    end = time.monotonic() + 20
    while "No such file" not in link.error:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert link.failed is None and not link.connected
    link.stop(timeout=60)
    assert link._thread not in threading.enumerate()
    link._on_change()  # a late callback after stop is harmless
    link.stop()


def test_a_link_that_dies_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    link = RankLink(tmp_path / "s.sock", FakeEndpoint(card(0)), expected_ranks=1)
    death = SystemExit("taken down")

    def die() -> None:
        raise death

    monkeypatch.setattr(link, "_serve", die)
    link.start()
    link._thread.join(20)
    assert link.failed is death


async def test_a_busy_endpoint_does_not_flood_the_sidecar(tmp_path: Path) -> None:
    """Thousands of signals of a busy endpoint are folded into the heartbeats."""
    endpoint = FakeEndpoint(card(0, tp_size=1))
    lines: list[int] = []
    async with running(tmp_path) as sidecar:
        took = sidecar.hub.message
        sidecar.hub.message = lambda conn, m: (lines.append(1), took(conn, m))[1]  # type: ignore[method-assign]
        link = RankLink(tmp_path / "s.sock", endpoint, expected_ranks=1).start()
        try:
            await ranks(sidecar, (0, "i1"))
            lines.clear()
            began = time.monotonic()
            for _ in range(50):  # 5000 signals in a second or more
                for _ in range(100):
                    endpoint.changed()
                await asyncio.sleep(0.02)
            beats = (time.monotonic() - began) / rank_link.HEARTBEAT
            assert len(lines) <= 4 + beats  # heartbeats only: nothing but their time changed
        finally:
            link.stop()


def test_stale_and_refused_times_are_those_of_the_contract() -> None:
    assert (model.STALE_AFTER, rank_link.HEARTBEAT) == (3.0, 0.5)
