"""What wiring costs over real NIXL: the first request beside later ones, and transfers while many peers are wired.

    python tests/bench/measure_wiring.py [--peers 64] [--regions 32] [--transport tcp] [--trials 5]

Two rank processes of one layout (prefill and decode), fresh ones each trial: requests one after the other right after
wiring, then again after some seconds of idling. Then prefill of one more pair is told to wire `peers` more ranks, whose
NIXL agents exist (in one process) and register `regions` regions each, while requests go on. No assertion; run it by
hand.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

PAGES, TOKENS, PAGE = 512, 16, 16 << 10
"""Pages of the pool, tokens and bytes of one."""
REQUEST = 64
"""Pages of a request: 1024 tokens."""
AGENTS = """
import base64, json, sys
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
made = []
for i in range(int(sys.argv[1])):
    agent = nixl_agent(f"twin-{i}", nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {})
    memory = np.zeros((int(sys.argv[2]), 16384), dtype=np.uint8)
    rows = [[int(row.ctypes.data), row.nbytes, 0] for row in memory]
    agent.register_memory(np.array(rows, dtype=np.uint64), "DRAM")
    made.append((agent, memory))
print("UP " + json.dumps([base64.b64encode(a.get_agent_metadata()).decode() for a, _ in made]), flush=True)
sys.stdin.read()
"""


def rank(role: str, regions: int) -> None:
    """One rank: says its card, then does what it is told, one JSON line each."""
    from kv_world import BOOTSTRAP, READY, Pool, template

    from pdtransfer.contract.base import Role
    from pdtransfer.contract.card import RankCard
    from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout
    from pdtransfer.session.api import EndpointConfig, PoolRegion
    from pdtransfer.session.endpoint import RankEndpoint

    pool = np.zeros((regions, PAGES, PAGE), dtype=np.uint8)
    pool[:] = 1  # resident
    card = template(Role(role), Pool(0, 1), "1")
    layout = RankLayout(
        page_tokens=TOKENS,
        kv_dtype="bfloat16",
        heads=HeadSlice(first=0, count=4, total=4),
        coordinates=RankCoordinates(tp=0, tp_size=1),
    )
    dims = {"layers": regions // 2, "head_dim": 128, "v_head_dim": 128}
    card = card.model_copy(update={"layout": layout, "model": card.model.model_copy(update=dims)})
    places = [PoolRegion(i // 2, "KV"[i % 2], int(pool[i].ctypes.data), PAGE, PAGES) for i in range(regions)]
    config = EndpointConfig(listen_host="127.0.0.1", net_devices="lo")
    endpoint = RankEndpoint(card, places, config)
    print(endpoint.card.model_dump_json(), flush=True)
    tokens, numbers = REQUEST * TOKENS, list(range(0, 2 * REQUEST, 2))
    for line in sys.stdin:
        do = json.loads(line)
        answer: dict[str, Any] = {}
        if do["do"] == "peers":
            endpoint.apply_peers([RankCard.model_validate_json(c) for c in do["cards"]])
            answer["wired"] = do["wait"] and endpoint.wait_wired(20)
            answer["verdicts"] = [v.message for v in endpoint.verdicts]
        elif do["do"] == "send":
            sender = endpoint.send(room=do["room"], tokens=tokens)
            sender.chunk(numbers, 0, READY)
            sender.finish(b"")
        elif do["do"] == "receive":
            began = time.perf_counter()
            got = endpoint.receive(room=do["room"], attempt=0, bootstrap=BOOTSTRAP, pages=numbers, tokens=tokens)
            state = got.wait(30)
            assert state == "Success", (state, got.error)
            answer["seconds"] = time.perf_counter() - began
        elif do["do"] == "loading":
            total, *counts = endpoint.metrics["peer_load_seconds"][0][1]
            answer = {"seconds": total, "loads": sum(counts)}
        elif do["do"] == "counters":
            answer = dict(endpoint.counters)
        print(json.dumps(answer), flush=True)


class Remote:
    """A rank process."""

    def __init__(self, role: str, regions: int, env: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--role", role, "--regions", str(regions)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.card = self.read()

    def read(self) -> str:
        """The next JSON line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return line.strip()
        raise RuntimeError("the rank has ended")

    def ask(self, do: str, **values: object) -> dict[str, Any]:
        """Tell it to do something, and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.read()))


def requests(prefill: Remote, decode: Remote, rooms: range) -> list[float]:
    """Milliseconds of one request after the other, at decode."""
    took = []
    for room in rooms:
        prefill.ask("send", room=room)
        took.append(1e3 * decode.ask("receive", room=room)["seconds"])
    return took


def spread(values: list[float]) -> str:
    low, middle, high = (float(np.percentile(values, q)) for q in (10, 50, 90))
    return f"{low:8.2f} {middle:8.2f} {high:8.2f} ms"


def twins(agents: subprocess.Popen[str], card_json: str) -> list[str]:
    """Cards of ranks whose agents live in the process `agents`."""
    from pdtransfer.contract.card import RankCard

    assert agents.stdout is not None
    line = next(ln for ln in agents.stdout if ln.startswith("UP "))
    card = RankCard.model_validate_json(card_json)
    made = []
    for i, metadata in enumerate(json.loads(line[3:])):
        update = {"pod_uid": f"pod-{i}", "agent_name": f"twin-{i}", "nixl_metadata": metadata}
        made.append(card.model_copy(update=update).sealed().model_dump_json())
    size = len(base64.b64decode(json.loads(line[3:])[0]))
    print(f"{len(made)} more agents, {size} bytes of metadata each")
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role")
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--regions", type=int, default=32)
    parser.add_argument("--transport", default="")
    parser.add_argument("--trials", type=int, default=5)
    a = parser.parse_args()
    if a.role:
        rank(a.role, a.regions)
        return
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "ERROR"}
    if a.transport:
        env["UCX_TLS"] = a.transport
    size = REQUEST * PAGE * a.regions
    print(f"requests of {size >> 20} MiB, one after the other, {a.transport or 'UCX chooses'}; 10, 50 and 90 % of them")
    first: list[float] = []
    idle: list[float] = []
    rest: list[float] = []
    for _ in range(a.trials):
        with pair(a.regions, env) as (prefill, decode):
            took = requests(prefill, decode, range(10))
            time.sleep(2)
            again = requests(prefill, decode, range(10, 20))
            first, idle, rest = [*first, took[0]], [*idle, again[0]], [*rest, *took[1:], *again[1:]]
    print(f"the first after wiring   {spread(first)} ({a.trials} pairs of ranks)")
    print(f"the first after idling   {spread(idle)}")
    print(f"all others               {spread(rest)}")
    with pair(a.regions, env) as (prefill, decode):
        many(prefill, decode, a.peers, a.regions, env)


@contextlib.contextmanager
def pair(regions: int, env: dict[str, str]) -> Iterator[tuple[Remote, Remote]]:
    """Two wired ranks."""
    prefill, decode = Remote("prefill", regions, env), Remote("decode", regions, env)
    try:
        prefill.ask("peers", cards=[decode.card], wait=False)
        for side, other in ((decode, prefill), (prefill, decode)):
            answer = side.ask("peers", cards=[other.card], wait=True)
            assert answer["wired"], answer
        yield prefill, decode
    finally:
        for process in (prefill.process, decode.process):
            process.kill()
            process.wait(10)


def many(prefill: Remote, decode: Remote, count: int, regions: int, env: dict[str, str]) -> None:
    """Requests while prefill is told of `count` more ranks."""
    agents = subprocess.Popen(
        [sys.executable, "-c", AGENTS, str(count), str(regions)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        others = twins(agents, decode.card)
        quiet = requests(prefill, decode, range(100, 140))
        before = prefill.ask("loading")
        began = time.perf_counter()
        prefill.ask("peers", cards=[decode.card, *others], wait=False)
        busy, room = [], 1000
        while (state := prefill.ask("loading"))["loads"] < before["loads"] + count:
            busy += requests(prefill, decode, range(room, room + 1))
            room += 1
        took = time.perf_counter() - began
        print(f"before wiring {count:3}        {spread(quiet)}")
        print(f"while wiring {count:3}         {spread(busy)} ({len(busy)} requests)")
        spent = 1e3 * (state["seconds"] - before["seconds"])
        print(f"{count} peers took {took:.2f} s, {spent / count:.2f} ms each in the agent")
    finally:
        agents.kill()
        agents.wait(10)


if __name__ == "__main__":
    main()
