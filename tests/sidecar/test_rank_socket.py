"""The unix socket: registration, replacement, refusals, bounds."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest
from sidecar_kit import card, give, peer, ranks, roster, running, until, verdict

from pdtransfer.contract.link import Heartbeat, Hello, Refuse, Verdicts, sidecar_messages
from pdtransfer.sidecar import sockets, views


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
            # The silent one alone meets its deadline: a slow machine may be late with the others.
            monkeypatch.setattr(sockets, "HELLO_DEADLINE", 60.0 if said else 0.3)
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
        monkeypatch.setattr(sockets, "HELLO_DEADLINE", 60.0)
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

        def fresh() -> bool:
            c.say(Heartbeat())  # again at each look: on a slow machine one may be old by the time it is looked at
            return views.pod_cards(sidecar.hub.state, sidecar.hub.clock()).stale_ranks == ()

        await until(fresh)
        c.close()
