"""Bytes of one control connection as frames: in any pieces, up to a bound, also for one who does not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest
from pydantic import BaseModel

from pdtransfer.session.channel import MAX_UNSENT, Channel
from pdtransfer.session.frames import HEADER, MAX_HELLO, Abort, FrameError, Ping, Pong, Started, decode, encode

IDS = {"room": 7, "attempt": 0, "source": "p", "destination": "d"}
FRAMES = (Started(**IDS), Abort(**IDS, reason="x" * 300), Started(**IDS))
STREAM = b"".join(encode(frame) for frame in FRAMES)


class Wire(asyncio.Transport):
    """The other end of a connection: what was written to it, and whether it is read from."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.unsent = bytearray(), 0
        self.reading, self.closed, self.aborted = True, False, False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def opened() -> tuple[Channel, Wire]:
    channel, wire = Channel(), Wire()
    channel.connection_made(wire)
    return channel, wire


async def served(channel: Channel, seen: list[BaseModel]) -> asyncio.Task[None]:
    """Somebody serves, and waits."""
    task = asyncio.create_task(channel.serve(seen.append))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("step", [1, 3, 50, len(STREAM)])
def test_frames_are_handed_on_whole_and_in_order_in_whatever_pieces_they_come(step: int) -> None:
    async def work() -> None:
        channel, _ = opened()
        seen: list[BaseModel] = []
        task = await served(channel, seen)
        for start in range(0, len(STREAM), step):
            channel.data_received(STREAM[start : start + step])
        assert seen == list(FRAMES)  # in the turn in which the last byte came
        channel.connection_lost(None)
        await task

    run(work())


def test_what_comes_before_anybody_serves_waits_and_a_flood_is_not_read() -> None:
    async def work() -> None:
        channel, wire = opened()
        channel.data_received(STREAM)
        assert wire.reading
        assert await channel.receive(MAX_HELLO) == FRAMES[0]
        channel.data_received(encode(FRAMES[2]) * (MAX_HELLO // 50))
        assert not wire.reading
        seen: list[BaseModel] = []
        task = await served(channel, seen)
        assert wire.reading and seen == [*FRAMES[1:], *[FRAMES[2]] * (MAX_HELLO // 50)]
        channel.connection_lost(None)
        await task

    run(work())


@pytest.mark.parametrize("rest", [b"", STREAM[:3], STREAM[: HEADER.size + 4]])
def test_a_connection_that_ends_within_a_frame_just_ends(rest: bytes) -> None:
    async def work() -> None:
        channel, _ = opened()
        channel.data_received(rest)
        channel.connection_lost(ConnectionResetError())
        assert await channel.receive() is None
        await channel.serve(lambda frame: pytest.fail(f"{frame} never came"))

    run(work())


def test_a_frame_over_the_bound_and_one_that_is_none_are_refused_and_nothing_after_them_is_obeyed() -> None:
    async def work() -> None:
        channel, _ = opened()
        channel.data_received(HEADER.pack(MAX_HELLO + 1))
        with pytest.raises(FrameError, match=f"over the bound of {MAX_HELLO}"):
            await channel.receive(MAX_HELLO)
        channel, _ = opened()
        seen: list[BaseModel] = []
        task = await served(channel, seen)
        channel.data_received(encode(FRAMES[0]) + HEADER.pack(2) + b"{}" + STREAM)
        channel.data_received(STREAM)
        with pytest.raises(FrameError, match="not a frame"):
            await task
        assert seen == [FRAMES[0]]

    run(work())


def test_what_breaks_who_serves_is_told_to_whoever_waits() -> None:
    async def work() -> None:
        channel, _ = opened()

        def broken(frame: BaseModel) -> None:
            raise RuntimeError("no such room")

        task = asyncio.create_task(channel.serve(broken))
        await asyncio.sleep(0)
        channel.data_received(STREAM)
        with pytest.raises(RuntimeError, match="no such room"):
            await task

    run(work())


def test_after_this_side_closed_nothing_is_obeyed() -> None:
    """The peer may have been told since that nothing of it is in flight."""

    async def work() -> None:
        channel, wire = opened()
        seen: list[BaseModel] = []
        task = await served(channel, seen)
        channel.data_received(STREAM[:5])
        channel.close()
        channel.data_received(STREAM[5:])
        channel.connection_lost(None)
        await task
        assert seen == [] and wire.closed and not channel.send(FRAMES[0]) and not wire.written

    run(work())


def test_a_ping_is_answered_and_handed_to_nobody() -> None:
    async def work() -> None:
        channel, wire = opened()
        seen: list[BaseModel] = []
        task = await served(channel, seen)
        channel.data_received(encode(Ping()) + encode(Pong()) + encode(FRAMES[0]))
        assert seen == [FRAMES[0]]
        assert decode(bytes(wire.written[HEADER.size :])) == Pong()
        channel.connection_lost(None)
        await task

    run(work())


def test_a_peer_that_does_not_read_is_cut_off() -> None:
    channel, wire = opened()
    wire.unsent = MAX_UNSENT
    assert channel.send(FRAMES[0]) and not wire.aborted
    wire.unsent = MAX_UNSENT + 1
    assert not channel.send(FRAMES[0]) and wire.aborted and channel.closed_here
