"""The router client against the real smg with two HTTP workers that are only healthy."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from smg_kit import smg

from free_ports import free_port
from pdoperator.domain.actions import DesiredWorker, SetWorkers
from pdoperator.domain.observed import Worker
from pdoperator.pods.router import RouterClient, RouterError

KEY = "a" * 64


class _Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"status": "ok", "model_path": "m", "served_model_name": "m"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@dataclass(frozen=True)
class Router:
    port: int
    prefill: str
    decode: str


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    checks = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1")
    try:
        with smg(KEY, *checks) as port:
            yield Router(port, *(f"http://127.0.0.1:{s.server_address[1]}" for s in servers))
    finally:
        for server in servers:
            server.shutdown()


async def listed(client: RouterClient, wanted: int, seconds: float = 60.0) -> tuple[Worker, ...]:
    """Workers once there are `wanted` of them, all healthy."""
    deadline = time.monotonic() + seconds
    while True:
        found = await client.workers("127.0.0.1", KEY)
        if len(found) == wanted and all(w.healthy for w in found):
            return found
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.2)


async def test_workers_are_added_with_their_island_listed_and_removed(router: Router) -> None:
    client = RouterClient(port=router.port, deadline=30.0)
    add = (
        DesiredWorker(router.prefill, "prefill", 8998, "island-a"),
        DesiredWorker(router.decode, "decode", None, "island-a"),
    )
    await client.set_workers(SetWorkers("r", "127.0.0.1", add=add), KEY)
    found = {w.url: w for w in await listed(client, 2)}
    prefill, decode = found[router.prefill], found[router.decode]
    assert (prefill.worker_type, prefill.bootstrap_port, prefill.pairing_protocol) == ("prefill", 8998, "island-a")
    assert (decode.worker_type, decode.bootstrap_port, decode.pairing_protocol) == ("decode", None, "island-a")
    await client.set_workers(SetWorkers("r", "127.0.0.1", add=add), KEY)  # listed already: no error, no double
    await listed(client, 2)
    await client.set_workers(SetWorkers("r", "127.0.0.1", remove=(prefill.id,)), KEY)
    # The same URL on another island while the old entry is still leaving: 409, to be asked again.
    moved = DesiredWorker(router.prefill, "prefill", 8998, "island-b")
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        await client.set_workers(SetWorkers("r", "127.0.0.1", add=(moved,)), KEY)
        workers = {w.url: w for w in await client.workers("127.0.0.1", KEY)}
        if router.prefill in workers and workers[router.prefill].pairing_protocol == "island-b":
            break
        await asyncio.sleep(0.5)
    else:
        raise AssertionError("the worker never moved to island-b")
    await client.close()


async def test_a_wrong_key_a_wrong_id_and_no_router_are_errors_by_name(router: Router) -> None:
    client = RouterClient(port=router.port, deadline=30.0)
    with pytest.raises(RouterError, match="401"):
        await client.workers("127.0.0.1", "not the key")
    with pytest.raises(RouterError, match="DELETE /workers/nonsense answered 400"):
        await client.set_workers(SetWorkers("r", "127.0.0.1", remove=("nonsense",)), KEY)
    await client.close()
    nobody = RouterClient(port=free_port())
    with pytest.raises(RouterError, match="GET /workers"):
        await nobody.workers("127.0.0.1", KEY)
    await nobody.close()
