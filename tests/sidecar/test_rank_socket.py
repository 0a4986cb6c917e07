"""The unix socket and the ranks' link: registration, replacement, refusals, restarts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import stat
import threading
import time
from pathlib import Path

import pytest
from sidecar_kit import FakeEndpoint, card, peer, roster, running, until, verdict

from pdtransfer.contract.link import Heartbeat, Hello, Refuse, Verdicts, sidecar_messages
from pdtransfer.contract.roster import Roster, RosterRefusal
from pdtransfer.sidecar import model, rank_link, rosters, sockets, views
from pdtransfer.sidecar.main import Sidecar
from pdtransfer.sidecar.rank_link import RankLink


class Raw:
    """A hand-driven rank connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, folder: Path) -> Raw:
        return cls(*await asyncio.open_unix_connection(folder / "s.sock", limit=1 << 24))

    def say(self, message: object) -> None:
        data = message if isinstance(message, bytes) else message.model_dump_json().encode() + b"\n"
        self.writer.write(data)

    async def hear(self) -> object:
        async with asyncio.timeout(20):
            line = await self.reader.readline()
        return sidecar_messages.validate_json(line) if line else None

    def close(self) -> None:
        self.writer.close()


def hello(rank: int = 0, expected: int = 2, **kw: str) -> Hello:
    return Hello(card=card(rank, **kw), expected_ranks=expected)


def give(sidecar: Sidecar, r: Roster) -> RosterRefusal | None:
    body = r.model_dump_json().encode()
    return sidecar.hub.put_roster(rosters.parse(body), body)


async def ranks(sidecar: Sidecar, *wanted: tuple[int, str]) -> None:
    await until(lambda: [(r.rank, r.card.incarnation) for r in sidecar.hub.state.ranks] == list(wanted))


async def test_the_connection_is_the_registration(tmp_path: Path) -> None:
    async with running(tmp_path, socket_mode=0o660) as sidecar:
        assert stat.S_IMODE((tmp_path / "s.sock").stat().st_mode) == 0o660
        a, b = await Raw.open(tmp_path), await Raw.open(tmp_path)
        a.say(hello(0))
        b.say(hello(1))
        await ranks(sidecar, (0, "i1"), (1, "i1"))
        a.close()
        await ranks(sidecar, (1, "i1"))
        b.close()
        await ranks(sidecar)
        assert sidecar.hub.state.incarnation == "i1"


async def test_a_new_incarnation_takes_the_place_of_every_older_connection(tmp_path: Path) -> None:
    async with running(tmp_path) as sidecar:
        old = [await Raw.open(tmp_path), await Raw.open(tmp_path)]
        for i, c in enumerate(old):
            c.say(hello(i))
        await ranks(sidecar, (0, "i1"), (1, "i1"))
        new = await Raw.open(tmp_path)
        new.say(hello(1, incarnation="i2"))
        await ranks(sidecar, (1, "i2"))
        assert [await c.hear() for c in old] == [None, None]
        zombie = await Raw.open(tmp_path)
        zombie.say(hello(0, incarnation="i1"))
        answer = await zombie.hear()
        assert isinstance(answer, Refuse) and answer.reason == "OldIncarnation"
        await ranks(sidecar, (1, "i2"))
        new.close()


async def test_junk_oversize_and_silent_clients_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HELLO_DEADLINE", 1.0)
    data = json.loads(hello().model_dump_json())
    data["card"]["layout"]["page_tokens"] = 0
    table = [
        (b"not json\n", "BadMessage", "Invalid JSON"),
        (b"{}\n", "BadMessage", "type"),
        (b"\xff\xfe\n", "BadMessage", ""),
        (json.dumps(data).encode() + b"\n", "BadMessage", "card.layout.page_tokens"),
        (Heartbeat(), "NoHello", "heartbeat"),
        (b"x" * 70_000, "OversizeLine", "65536"),
        (b"x" * 70_000 + b"\n", "OversizeLine", "65536"),
        (b"", "NoHello", "no Hello within"),
        (hello(pod_uid="other"), "OtherPod", "other"),
        (hello(cluster_uid="other"), "OtherCluster", "other"),
    ]
    async with running(tmp_path, max_line_bytes=65536) as sidecar:
        for said, reason, text in table:
            c = await Raw.open(tmp_path)
            c.say(said)
            answer = await c.hear()
            assert isinstance(answer, Refuse), (said, answer)
            assert answer.reason == reason and text in answer.message
            assert await c.hear() is None
            c.close()
        shown = views.pod_cards(sidecar.hub.state, sidecar.hub.clock())
        assert {r.reason for r in shown.refused} == {r for _, r, _ in table}
        assert "card.layout.page_tokens" in views.readiness(sidecar.hub.state, sidecar.hub.clock(), True).text
        good = await Raw.open(tmp_path)
        good.say(hello(0, 1))
        await ranks(sidecar, (0, "i1"))
        good.close()


async def test_a_junk_line_after_hello_ends_the_connection_and_its_card(tmp_path: Path) -> None:
    async with running(tmp_path) as sidecar:
        c = await Raw.open(tmp_path)
        c.say(hello(0, 1))
        c.say(Verdicts(verdicts=(verdict(0, peer(0)),)))
        await until(lambda: sidecar.hub.state.ranks and sidecar.hub.state.ranks[0].verdicts)
        c.say(b'{"type": "verdicts", "verdicts": 3}\n')
        answer = await c.hear()
        assert isinstance(answer, Refuse) and answer.reason == "BadMessage"
        await ranks(sidecar)


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


async def test_a_slow_rank_gets_the_newest_roster_and_bounded_memory_is_kept(tmp_path: Path) -> None:
    big = {0: tuple(peer(0, f"peer-{i}", layers=60) for i in range(30))}  # ~ 500 KB a roster
    async with running(tmp_path) as sidecar:
        c = await Raw.open(tmp_path)
        c.say(hello(0, 1))
        await ranks(sidecar, (0, "i1"))
        for counter in range(1, 21):
            r = roster((1, counter), big)
            assert give(sidecar, r) is None
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        (connection,) = sidecar.ranks._connections.values()
        assert len(connection._outbox) <= 1
        seen = []
        while not seen or seen[-1] < 20:
            message = await c.hear()
            seen.append(message.counter)
        assert len(seen) < 20
        c.close()


async def test_too_many_connections_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_CONNECTIONS", 3)
    async with running(tmp_path) as sidecar:
        held = [await Raw.open(tmp_path) for _ in range(3)]
        held[0].say(hello(0, 1))
        await ranks(sidecar, (0, "i1"))
        extra = await Raw.open(tmp_path)
        answer = await extra.hear()
        assert isinstance(answer, Refuse) and answer.reason == "TooManyConnections"
        await ranks(sidecar, (0, "i1"))


async def test_a_file_in_the_sockets_place_is_left_alone_and_an_old_socket_is_not(tmp_path: Path) -> None:
    (tmp_path / "s.sock").write_text("precious")
    with pytest.raises(ValueError, match="no socket"):
        async with running(tmp_path):
            pass
    assert (tmp_path / "s.sock").read_text() == "precious"
    (tmp_path / "s.sock").unlink()
    os.mknod(tmp_path / "s.sock", stat.S_IFSOCK | 0o600)
    async with running(tmp_path) as sidecar:
        c = await Raw.open(tmp_path)
        c.say(hello(0, 1))
        await ranks(sidecar, (0, "i1"))
        c.close()


async def test_a_rank_that_stops_beating_is_stale_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "STALE_AFTER", 0.2)
    async with running(tmp_path, wiring=False) as sidecar:
        c = await Raw.open(tmp_path)
        c.say(hello(0, 1))
        await ranks(sidecar, (0, "i1"))
        await asyncio.sleep(0.3)
        assert views.pod_cards(sidecar.hub.state, sidecar.hub.clock()).stale_ranks == (0,)
        assert views.readiness(sidecar.hub.state, sidecar.hub.clock(), False).ready
        c.say(Heartbeat())
        await until(lambda: views.pod_cards(sidecar.hub.state, sidecar.hub.clock()).stale_ranks == ())
        c.close()


def test_the_link_ends_at_once_without_a_sidecar_and_leaves_no_thread(tmp_path: Path) -> None:
    link = RankLink(tmp_path / "nothing.sock", FakeEndpoint(card(0)), expected_ranks=1).start()
    end = time.monotonic() + 20
    while "No such file" not in link.error:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert link.failed is None and not link.connected
    began = time.monotonic()
    link.stop()
    assert time.monotonic() - began < 10
    assert not any(t.name == "pdtransfer-rank-link" for t in threading.enumerate())
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
