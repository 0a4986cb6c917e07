"""Targets between ranks: frames, the stream they come in, and a live endpoint that hears them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from fuzz_target import LOOP, Target, text
from pydantic import BaseModel

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.session import frames
from pdtransfer.session.channel import Channel

IDS: dict[str, Any] = {"room": 7, "attempt": 1, "source": "prefill-1", "destination": "decode-1"}
FRAMES: tuple[BaseModel, ...] = (
    frames.Hello(
        cluster_uid="c", pod_uid="p", incarnation="i", rank=0, agent_name="a", layout_hash="h",
        to_pod_uid="q", to_incarnation="j", to_rank=1,
    ),
    frames.Welcome(pod_uid="p", incarnation="i", rank=0, agent_name="a"),
    frames.Refused(reason="PeerReplaced", message="m", drained=True),
    frames.Request(
        **IDS, serial=3, pages=(4, 5, 6), first_page=0, tokens=11, required=1, memory=MemoryKind.DRAM,
        pools=(frames.PoolPages(pool="swa", pages=(1, 2)),),
    ),
    frames.SlotsWanted(**IDS, arena=MemoryKind.DRAM, total=3),
    frames.SlotGrant(**IDS, arena=MemoryKind.DRAM, slot=1, ticket=9),
    frames.SlotFilled(**IDS, ticket=9, lane=0, first_region=0, regions=2, first_page=0, pages=1),
    frames.Started(**IDS),
    frames.Done(**IDS, nbytes=4096, metadata="aGk="),
    frames.Failed(**IDS, reason="Aborted", message="m", nbytes=1, settled=True),
    frames.Abort(**IDS, reason="r"),
    frames.AbortAck(**IDS),
    frames.Rotated(generation=1, oldest=0, agent_name="a.1", metadata="aGk=", metadata_hash="h"),
    frames.Moved(generation=1),
    frames.Ping(),
    frames.Pong(),
    frames.ProbeOpen(seq=1, samples=(frames.Sample(region=0, page=0, nbytes=64),)),
    frames.ProbeGrant(seq=1, address=4096, nbytes=64, digests=("d",)),
    frames.ProbeHash(seq=1),
    frames.ProbeDigests(seq=1, digests=("d",)),
    frames.ProbeCheck(seq=1),
    frames.ProbeChecked(seq=1, digest="d"),
    frames.ProbeClose(seq=1, settled=False),
)  # fmt: skip


def frame(data: bytes) -> str:
    try:
        got = frames.decode(data)
    except frames.FrameError:
        return "refused"
    hash(got)  # askers keep hashes of requests
    frames.encode(got)  # what was taken can be written again
    return type(got).__name__


def channel(data: bytes) -> str:
    """A stream of frames as the control channel reads it, with the two bounds it is read under."""
    return LOOP.run_until_complete(_receive(data))


class _Quiet(asyncio.Transport):
    """A connection without a socket."""

    def resume_reading(self) -> None: ...
    def pause_reading(self) -> None: ...
    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None: ...


async def _receive(data: bytes) -> str:
    """The first frame under the bound of strangers, the rest as a peer's; in pieces, as sockets bring them."""
    end = Channel()
    end.connection_made(_Quiet())
    step = max(1, len(data) // 3)
    for start in range(0, len(data), step):
        end.data_received(data[start : start + step])
    end.connection_lost(None)
    seen: list[str] = []
    try:
        first = await end.receive(frames.MAX_HELLO)
        if first is not None:
            seen.append(type(first).__name__)
            await end.serve(lambda frame: seen.append(type(frame).__name__))
    except frames.FrameError as error:
        return f"{len(seen)} refused {'bound' if 'over the bound' in str(error) else ''}"
    return f"{len(seen)} end"


def stream(*several: BaseModel) -> bytes:
    return b"".join(frames.encode(f) for f in several)


class LivePeer:
    """Frames of a rostered peer into endpoints that run (over the fake agent), both roles. Made at first use."""

    def __init__(self) -> None:
        self._world: Any = None
        self._count = 0

    def start(self) -> None:
        """Two wired ranks; takes seconds on a busy machine."""
        from kv_world import World

        world = World()
        self._pair = [world.rank(role) for role in (Role.PREFILL, Role.DECODE)]
        for mine, other in (self._pair, self._pair[::-1]):
            mine.endpoint.apply_peers([other.endpoint.card])
        assert all(rank.endpoint.wait_wired(120) for rank in self._pair), "the two ranks are not wired"
        self._world = world

    def __call__(self, data: bytes) -> str:
        if self._world is None:
            self.start()
        try:
            got = frames.decode(data)
        except frames.FrameError:
            return "refused"
        if isinstance(got, frames.Hello | frames.Welcome | frames.Refused | frames.Ping | frames.Pong):
            return "not for a peer"
        self._count += 1
        for rank in self._pair:
            self._hand(rank.endpoint, got)
        if self._count % 200 == 0:
            self._still_moves()
        return type(got).__name__

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    @staticmethod
    def _hand(endpoint: Any, got: frames.Frame) -> None:
        done, raised = threading.Event(), []

        def act() -> None:
            try:
                for one in list(endpoint._wiring.peers.values()):
                    endpoint._wiring.on_frame(one, got)
            except frames.FrameError:
                pass  # ends the connection, as a frame that does not decode
            except Exception as error:
                raised.append(error)
            done.set()

        endpoint._core.call(act)
        assert done.wait(10), "the endpoint's thread does not answer"
        if raised:
            raise raised[0]
        assert endpoint.failed is None, endpoint.failed

    def _still_moves(self) -> None:
        from kv_world import ask, give

        prefill, decode = self._pair
        for turn in range(3):  # on a busy machine one may run into its own short deadline
            room = 1_000_000 + 3 * self._count + turn  # beyond what the corpus names
            receiver = ask(decode, room, [4, 5])
            sender = give(prefill, room, [1, 2])
            if receiver.wait(8) == "Success":
                assert decode.pool.holds(room, [4, 5])
                return
        raise AssertionError(f"nothing moves any more: {receiver.error}, {sender.error}")


def live_peer() -> Target:
    """Frames of a peer, for a live endpoint."""
    # Not those by which a peer takes a new agent: believed, it would truly be gone.
    sent = [f for f in FRAMES[3:] if not isinstance(f, frames.Rotated | frames.Moved)]
    own = [f.model_copy(update={"room": 3}) if hasattr(f, "room") else f for f in sent]
    return Target(tuple(text(f) for f in (*sent, *own)), LivePeer())
