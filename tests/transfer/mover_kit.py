"""A mover over the fake agent, driven step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pdtransfer.agent.fake import FakeHub
from pdtransfer.contract.base import MemoryKind
from pdtransfer.mover.executor import Mover
from pdtransfer.mover.jobs import Batch, Job, Prepped

MIB = 1 << 20


class Bench:
    """A mover over a fake agent with two peers, and a clock that is moved by hand."""

    def __init__(self, **window) -> None:
        self.hub = FakeHub()
        self.agent = self.hub.agent("source")
        self.memory = np.arange(16 * MIB, dtype=np.uint8)
        rows = np.array([[self.memory.ctypes.data, self.memory.nbytes, 0]], dtype=np.uint64)
        self.agent.register(rows, MemoryKind.DRAM)
        self.targets = {}
        for name in ("a", "b"):
            target = self.hub.agent(name)
            memory = np.zeros(16 * MIB, dtype=np.uint8)
            target.register(np.array([[memory.ctypes.data, memory.nbytes, 0]], dtype=np.uint64), MemoryKind.DRAM)
            self.agent.peers.add(name)
            self.targets[name] = memory
        self.now = 0.0
        self.mover = Mover(
            self.agent,
            window_bytes=window.get("window_bytes", 64 * MIB),
            window_ops=window.get("window_ops", 16),
            settle=1.0,
            clock=lambda: self.now,
        )
        self.ended: list[Job] = []
        self.drained: list[Job] = []

    def batch(self, peer: str, size: int, at: int = 0) -> Batch:
        def row(base: int) -> np.ndarray:
            return np.array([[base + at, size, 0]], dtype=np.uint64)

        return Batch(
            row(self.memory.ctypes.data),
            MemoryKind.DRAM,
            row(self.targets[peer].ctypes.data),
            MemoryKind.DRAM,
            size,
        )

    def job(self, peer: str, count: int, size: int = 4096, deadline: float = 100.0) -> Job:
        job = Job(f"job {peer}", peer, deadline, self.ended.append, self.drained.append)
        self.mover.start(job)
        self.mover.add(job, (self.batch(peer, size, i * size) for i in range(count)))
        self.mover.close(job)
        return job

    def run(self, steps: int = 200) -> None:
        for _ in range(steps):
            self.now += 0.01
            self.mover.step()


class Lists:
    """Items out of prepared lists between `source` and one peer: 4 KiB blocks, one by one."""

    def __init__(self, bench: Bench, peer: str) -> None:
        def table(memory: np.ndarray) -> np.ndarray:
            return np.array([[memory.ctypes.data, 4096, 0, 4096, len(memory) // 4096]], dtype=np.uint64)

        self.local = bench.agent.prepare(None, table(bench.memory), MemoryKind.DRAM)
        self.remote = bench.agent.prepare(peer, table(bench.targets[peer]), MemoryKind.DRAM)
        self.pulled = 0
        self.told: list[tuple[int, bool]] = []

    def item(self, number: int, nbytes: int = 4096) -> Prepped:
        at = np.array([number], dtype=np.int32)
        return Prepped(
            self.local, at, self.remote, at, nbytes, 1, on_done=lambda moved: self.told.append((number, moved))
        )

    def items(self, count: int, nbytes: int = 4096) -> Iterator[Prepped]:
        for number in range(count):
            self.pulled += 1
            yield self.item(number, nbytes)


def lazy_job(bench: Bench, peer: str, more: Iterable[Prepped], deadline: float = 100.0) -> Job:
    """A job whose items are pulled as they may fly."""
    job = Job(f"job {peer}", peer, deadline, bench.ended.append, bench.drained.append)
    bench.mover.start(job)
    bench.mover.add(job, more)
    bench.mover.close(job)
    return job
