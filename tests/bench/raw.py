"""The rival without a session: NIXL's own API, one agent a rank, the same bytes.

`bulk` moves 1 MiB pieces, `natural` the pieces that the two layouts force: whole pages at equal TP, one token's run
of heads at unequal TP, between the same random pages as ours. What NIXL does best is used: strided descriptor lists
prepared once, transfers by index, at most 4096 descriptors and 16 MiB a handle, four handles in flight a rank, no
progress thread (it halves the rate), a notification on every handle that tells the target. Waiting is what ours does:
30 turns with yields, then sleeps of 50 us.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pool import Pool
from shape import MIB, Load, Setup

Kind = Literal["bulk", "natural"]
Indices = npt.NDArray[np.int32]
HANDLE_PIECES, HANDLE_BYTES, IN_FLIGHT, SPINS = 4096, 16 * MIB, 4, 30
PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None)


def timer_slack(nanoseconds: int) -> None:
    """Of the calling thread: with Linux's 50 us, a sleep of 50 us takes 100."""
    _libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds), 0, 0, 0)


class Wait:
    """The idle policy between two turns without news."""

    def __init__(self) -> None:
        self._quiet = 0

    def turn(self, news: bool) -> None:
        self._quiet = 0 if news else self._quiet + 1
        time.sleep(50e-6 if self._quiet > SPINS else 0)


def pieces(setup: Setup, kind: Kind, load: Load) -> tuple[int, int]:
    """Pieces that one pair of ranks moves, and bytes of one."""
    share = load.nbytes(setup) // setup.parts
    size = MIB if kind == "bulk" else setup.piece
    return share // size, size


def per_handle(size: int) -> int:
    """Pieces of a handle."""
    return min(HANDLE_PIECES, max(1, HANDLE_BYTES // size))


def handles(setup: Setup, kind: Kind, load: Load) -> int:
    """That one pair of ranks posts."""
    count, size = pieces(setup, kind, load)
    return -(-count // per_handle(size))


@dataclass(frozen=True)
class Far:
    """A target rank, as its source needs it."""

    metadata: bytes
    address: int
    first_head: int
    heads: int


@dataclass
class _Lists:
    local: Any
    remote: Any


class Raw:
    """One rank's agent over the whole pool."""

    def __init__(self, pool: Pool, name: str) -> None:
        from nixl import _api

        self.pool = pool
        config = _api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = _api.nixl_agent(name, config)
        array = pool.array
        self._agent.register_memory(np.array([[array.ctypes.data, array.nbytes, 0]], dtype=np.uint64), "DRAM")
        self._peers: list[str] = []
        self._lists: dict[tuple[Kind, int], _Lists] = {}

    def far(self) -> Far:
        """For the sources."""
        metadata = bytes(self._agent.get_agent_metadata())
        return Far(metadata, int(self.pool.array.ctypes.data), self.pool.first, self.pool.heads)

    def connect(self, targets: list[Far]) -> None:
        """Load and connect those that share heads, prepare the lists of both kinds."""
        mine = range(self.pool.first, self.pool.first + self.pool.heads)
        for target in targets:
            low = max(mine.start, target.first_head)
            high = min(mine.stop, target.first_head + target.heads)
            if low >= high:
                continue
            name = self._agent.add_remote_agent(target.metadata)
            name = name.decode() if isinstance(name, bytes) else name
            self._agent.make_connection(name)
            number = len(self._peers)
            self._peers.append(name)
            for kind in ("bulk", "natural"):
                self._lists[kind, number] = _Lists(
                    self._prepare("", kind, self.far(), low), self._prepare(name, kind, target, low)
                )

    def _prepare(self, peer: str, kind: Kind, side: Far, low: int) -> Any:
        """Strided rows (address, bytes, device, stride, count)."""
        setup = self.pool.setup
        model = setup.model
        region = setup.pool_pages * setup.page * side.heads * model.head_bytes
        if kind == "bulk":
            total = region * model.regions // MIB
            rows = [(side.address, MIB, 0, MIB, total)]
        else:
            row = side.heads * model.head_bytes
            stride = row if setup.unequal else row * setup.page
            offset = (low - side.first_head) * model.head_bytes
            rows = [
                (side.address + r * region + offset, setup.piece, 0, stride, region // stride)
                for r in range(model.regions)
            ]
        return self._agent.prep_xfer_dlist(peer, np.array(rows, dtype=np.uint64), "DRAM")

    def _indices(self, kind: Kind, pages: npt.NDArray[np.int64], count: int, heads: int) -> Indices:
        """Pieces in the order region, page, token; for `bulk`, evenly spread over the pool."""
        setup = self.pool.setup
        model = setup.model
        if kind == "bulk":
            total = setup.pool_pages * setup.page * heads * model.head_bytes * model.regions // MIB
            return np.arange(count, dtype=np.int32) * np.int32(total // count)
        each = setup.page if setup.unequal else 1
        region = np.arange(model.regions, dtype=np.int32).reshape(-1, 1, 1) * np.int32(setup.pool_pages * each)
        page = pages.astype(np.int32).reshape(1, -1, 1) * np.int32(each)
        return (region + page + np.arange(each, dtype=np.int32)).ravel()

    def send(
        self, kind: Kind, load: Load, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], far_heads: int
    ) -> None:
        """Post everything, to each target in turn; returns when every handle is done."""
        count, size = pieces(self.pool.setup, kind, load)
        step = per_handle(size)
        local = self._indices(kind, source, count, self.pool.heads)
        remote = self._indices(kind, target, count, far_heads)
        todo = deque((peer, start) for start in range(0, count, step) for peer in range(len(self._peers)))
        flying: list[Any] = []
        wait = Wait()
        while todo or flying:
            news = False
            while todo and len(flying) < IN_FLIGHT * len(self._peers):
                peer, start = todo.popleft()
                lists = self._lists[kind, peer]
                handle = self._agent.make_prepped_xfer(
                    "WRITE", lists.local, local[start : start + step], lists.remote, remote[start : start + step], b"n"
                )
                self._agent.transfer(handle)
                flying.append(handle)
                news = True
            for handle in list(flying):
                state = self._agent.check_xfer_state(handle)
                if state == "DONE":
                    self._agent.release_xfer_handle(handle)
                    flying.remove(handle)
                    news = True
                elif state == "ERR":
                    raise RuntimeError(f"raw {kind}: a transfer failed")
            wait.turn(news)

    def receive(self, expected: int, deadline: float) -> float:
        """Progress until that many notifications came; when the last one did (seconds, monotonic)."""
        wait = Wait()
        while expected > 0:
            notes = self._agent.get_new_notifs()
            expected -= sum(len(messages) for messages in notes.values())
            if time.perf_counter() > deadline:
                raise TimeoutError(f"raw: {expected} notifications did not come")
            wait.turn(bool(notes))
        return time.perf_counter()
