"""Rate of whole requests through the session API, next to raw NIXL and memcpy on the same machine.

    [UCX_TLS=tcp] python tests/bench/bench_pair.py [MiB] [rounds]

ours: TP 1 or 2 on either side, 16 layers, K and V, 16-token pages, random pages, from the decode's receive to Success.
rival: raw NIXL without a session, the same bytes in the pieces that unequal TP needs (1 KiB, written with a gap), 4096
a handle; for equal TP, whole pages of 32 KiB are between that and raw 1 MiB.
limit: raw NIXL in 1 MiB writes, posted at once to one handle, and memcpy.
Medians are printed, in ms and as ratios of rates; the machine is shared, so nothing is asserted.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ.setdefault("UCX_NET_DEVICES", "lo")

from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.agent.port import HandleState
from pdtransfer.contract.base import EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout
from pdtransfer.contract.pairing import peers_of
from pdtransfer.session.api import EndpointConfig, PoolRegion
from pdtransfer.session.endpoint import RankEndpoint

LAYERS, TOKENS, HEADS, DIM = 16, 16, 8, 128
PAGE = TOKENS * HEADS * DIM * 2
MIB = 1 << 20


class Ready:
    """Set."""

    def wait(self, timeout: float) -> bool:
        return True


def rank(role: str, tp: int, size: int, pages: int, pipe: Connection) -> None:
    heads = HEADS // size
    pool = np.ones((LAYERS * 2, 2 * pages, TOKENS, heads, DIM), dtype=np.uint16)
    regions = [
        PoolRegion(i // 2, "KV"[i % 2], int(pool[i].ctypes.data), pool[i, 0].nbytes, 2 * pages)
        for i in range(LAYERS * 2)
    ]
    card = RankCard(
        cluster_uid="bench",
        pod_uid=role,
        role=Role(role),
        incarnation=role,
        model=ModelIdentity(name="bench", dtype="bfloat16", layers=LAYERS),
        layout=RankLayout(
            page_tokens=TOKENS,
            kv_dtype="bfloat16",
            heads=HeadSlice(first=tp * heads, count=heads, total=HEADS),
            coordinates=RankCoordinates(tp=tp, tp_size=size),
        ),
        engine=EngineFacts(type=EngineType.REFERENCE, version="bench"),
        agent_name="",
        bootstrap="bench:1" if role == "prefill" else "",
    )
    endpoint = RankEndpoint(card, regions, EndpointConfig(listen_host="127.0.0.1", net_devices="lo"))
    pipe.send(endpoint.card)
    endpoint.apply_peers(pipe.recv())
    pipe.send(endpoint.wait_wired(20))
    rng = np.random.default_rng(0)
    while (job := pipe.recv()) is not None:
        room, count = job
        numbers = rng.permutation(2 * pages)[:count].tolist()
        began = time.perf_counter()
        if role == "prefill":
            transfer = endpoint.send(room=room, tokens=count * TOKENS)
            transfer.chunk(numbers, 0, Ready())
            transfer.finish(b"")
        else:
            transfer = endpoint.receive(room=room, attempt=0, bootstrap="bench:1", pages=numbers, tokens=count * TOKENS)
        pipe.send((str(transfer.wait(60)), time.perf_counter() - began))
    endpoint.close()


def raw_target(size: int, pipe: Connection) -> None:
    agent = NixlAgent("raw-target", net_devices="lo")
    memory = np.ones(size, dtype=np.uint8)  # written, so that no page is first touched in a measurement
    agent.register(np.array([[memory.ctypes.data, size, 0]], dtype=np.uint64), MemoryKind.DRAM)
    pipe.send((agent.metadata(), int(memory.ctypes.data)))
    while not pipe.poll():
        agent.progress()


def raw(agent: NixlAgent, local: object, remote: object, count: int) -> float:
    order = np.arange(count, dtype=np.int32)
    began = time.perf_counter()
    handle = agent.post("WRITE", local, order, remote, order[::-1].copy())  # reversed: no merging
    while agent.poll(handle) is HandleState.ACTIVE:
        pass
    took = time.perf_counter() - began
    agent.release(handle)
    return took


def raw_pieces(agent: NixlAgent, peer: str, source: int, target: int, size: int) -> float:
    """Seconds for `size` bytes in pieces of 1 KiB, 2 KiB apart at the target (its half, twice)."""
    piece, many = 1024, 4096
    began = time.perf_counter()
    for start in range(0, size // piece, many):
        at = (np.arange(start, start + many, dtype=np.uint64) * 2) % np.uint64(size // piece)
        local, remote = np.empty((many, 3), dtype=np.uint64), np.empty((many, 3), dtype=np.uint64)
        local[:, 0] = source + np.arange(start, start + many, dtype=np.uint64) * piece
        remote[:, 0] = target + at * np.uint64(piece)
        local[:, 1] = remote[:, 1] = piece
        local[:, 2] = remote[:, 2] = 0
        order = np.arange(many, dtype=np.int32)
        handle = agent.post(
            "WRITE",
            agent.prepare(None, local, MemoryKind.DRAM),
            order,
            agent.prepare(peer, remote, MemoryKind.DRAM),
            order,
        )
        while agent.poll(handle) is HandleState.ACTIVE:
            pass
        agent.release(handle)
    return time.perf_counter() - began


def main() -> None:
    mib, rounds = (int(a) for a in (sys.argv[1:3] or ["64", "5"]))
    context = mp.get_context("spawn")
    size = mib * MIB
    pages = size // (PAGE * LAYERS * 2)
    pipe, far = context.Pipe()
    target = context.Process(target=raw_target, args=(size, far), daemon=True)
    target.start()
    agent = NixlAgent("raw-source", net_devices="lo")
    source, copy = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    agent.register(np.array([[source.ctypes.data, size, 0]], dtype=np.uint64), MemoryKind.DRAM)
    metadata, address = pipe.recv()
    name = agent.add_peer(metadata)

    def rows(base: int) -> np.ndarray:
        found = np.empty((mib, 3), dtype=np.uint64)
        found[:, 0] = base + np.arange(mib, dtype=np.uint64) * MIB
        found[:, 1], found[:, 2] = MIB, 0
        return found

    local = agent.prepare(None, rows(source.ctypes.data), MemoryKind.DRAM)
    remote = agent.prepare(name, rows(address), MemoryKind.DRAM)
    raw(agent, local, remote, mib)
    raw_pieces(agent, name, source.ctypes.data, address, size)
    times: dict[str, list[float]] = {"raw 1 MiB": [], "raw 1 KiB": [], "memcpy": []}
    for _ in range(rounds):
        times["raw 1 KiB"].append(raw_pieces(agent, name, source.ctypes.data, address, size))
        times["raw 1 MiB"].append(raw(agent, local, remote, mib))
        began = time.perf_counter()
        np.copyto(copy, source)
        times["memcpy"].append(time.perf_counter() - began)
    pipe.send(None)
    target.join(5)
    for p, d in ((1, 1), (2, 1), (1, 2)):
        for label, count in (("bulk", pages), ("64 tokens", 4)):
            times[f"ours TP {p}->{d} {label}"] = session(context, p, d, pages, count, rounds)
    medians = {k: statistics.median(v) for k, v in times.items()}
    print(f"{mib} MiB bulk, {4 * PAGE * LAYERS * 2 / MIB:.0f} MiB in 64 tokens; median (min-max) of {rounds}")
    for key, value in times.items():
        ratio = ""
        if "->" in key and "64 tokens" not in key:
            ratio = ", ".join(
                f"{medians[other] / medians[key]:.2f} x {other}" for other in medians if "->" not in other
            )
        print(f"{key:22} {medians[key] * 1e3:8.1f} ms ({min(value) * 1e3:.1f}-{max(value) * 1e3:.1f}) {ratio}")
    print(json.dumps({k: round(v * 1e3, 2) for k, v in medians.items()}))


def session(context: mp.context.SpawnContext, p: int, d: int, pages: int, count: int, rounds: int) -> list[float]:
    """Seconds from the decode's receive to Success on every decode rank."""
    pipes, workers = [], []
    for role, size in (("prefill", p), ("decode", d)):
        for tp in range(size):
            pipe, far = context.Pipe()
            worker = context.Process(target=rank, args=(role, tp, size, pages, far), daemon=True)
            worker.start()
            pipes.append(pipe)
            workers.append(worker)
    cards = [pipe.recv() for pipe in pipes]
    for pipe, card in zip(pipes, cards, strict=True):
        pipe.send(peers_of(card, cards))
    assert all(pipe.recv() for pipe in pipes)
    found = []
    for room in range(rounds + 1):
        for pipe in reversed(pipes):
            pipe.send((room, count))
        answers = [pipe.recv() for pipe in pipes]
        assert all(state == "Success" for state, _ in answers), answers
        if room:
            found.append(max(seconds for _, seconds in answers[p:]))
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join(10)
    return found


if __name__ == "__main__":
    main()
