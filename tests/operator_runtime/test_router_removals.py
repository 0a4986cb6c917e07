"""A removal is asked for once, whatever the router shows of it, and the real smg shows it as draining."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from smg_kit import smg

from pdoperator.domain.actions import DesiredWorker, SetWorkers
from pdoperator.domain.observed import Worker
from pdoperator.pods.router import REMOVAL_SECONDS, RouterClient, RouterError

KEY = "b" * 64
TAKE_OFF = SetWorkers("r", "127.0.0.1", remove=("w-1",))


class _Answers(http.server.BaseHTTPRequestHandler):
    """Notes what it is asked and answers from its server's `pages`: method -> (status, body)."""

    server: _Server

    def _answer(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        status, body = self.server.pages.get(self.command, (200, {}))
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        return


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, pages: dict[str, tuple[int, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.pages = pages
        self.asked: list[str] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])


@contextmanager
def serving(**pages: tuple[int, Any]) -> Iterator[_Server]:
    server = _Server(pages)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


async def test_an_accepted_removal_is_asked_for_once_until_its_time_is_over() -> None:
    now = [100.0]
    with serving(DELETE=(202, {})) as router:
        client = RouterClient(port=router.port, deadline=30.0, clock=lambda: now[0])
        for _ in range(3):
            await client.set_workers(TAKE_OFF, KEY)
        assert router.asked == ["DELETE /workers/w-1"]
        now[0] += REMOVAL_SECONDS - 0.1
        await client.set_workers(TAKE_OFF, KEY)
        assert len(router.asked) == 1
        now[0] += 0.2  # still there: it got lost
        await client.set_workers(TAKE_OFF, KEY)
        assert len(router.asked) == 2
        await client.close()


async def test_a_removal_that_was_refused_is_asked_for_again_at_once() -> None:
    with serving(DELETE=(500, {})) as router:
        client = RouterClient(port=router.port, deadline=30.0)
        for _ in range(2):
            with pytest.raises(RouterError, match="answered 500"):
                await client.set_workers(TAKE_OFF, KEY)
        assert len(router.asked) == 2
        await client.close()


@pytest.mark.parametrize(
    ("status", "draining"), [("draining", True), ("ready", False), (None, False), ({"kind": "new"}, False)]
)
async def test_what_a_router_says_of_a_workers_state_is_read_or_left_alone(status: Any, draining: bool) -> None:
    worker = {"id": "i", "url": "http://10.0.0.1:30000", "worker_type": "decode", "is_healthy": True, "status": status}
    with serving(GET=(200, {"workers": [worker]})) as router:
        client = RouterClient(port=router.port, deadline=30.0)
        (found,) = await client.workers("127.0.0.1", KEY)
        assert (found.draining, found.serves) == (draining, not draining)
        await client.close()


async def until(client: RouterClient, wanted: Any, seconds: float = 60.0) -> tuple[Worker, ...]:
    """The router's list as soon as `wanted` holds for it."""
    deadline = time.monotonic() + seconds
    last: Any = None
    while time.monotonic() < deadline:
        try:
            last = await client.workers("127.0.0.1", KEY)
            if wanted(last):
                return tuple(last)
        except RouterError as error:
            last = error
        await asyncio.sleep(0.05)
    raise AssertionError(f"never so within {seconds:g} s: {last}")


async def test_the_real_router_tells_that_it_drains_what_it_was_asked_to_remove() -> None:
    """What the operator goes by. A router that was held up for the whole drain is asked again."""
    model = {"status": "ok", "model_path": "m", "served_model_name": "m"}
    with serving(GET=(200, model)) as engine, smg(KEY) as port:
        client = RouterClient(port=port, deadline=30.0)
        await until(client, lambda found: found == ())
        add = SetWorkers("r", "127.0.0.1", add=(DesiredWorker(f"http://127.0.0.1:{engine.port}", "decode", None, "i"),))
        ids = set()
        for _ in range(5):
            await client.set_workers(add, KEY)
            (worker,) = await until(client, lambda found: found and found[0].serves)
            ids.add(worker.id)
            await client.set_workers(SetWorkers("r", "127.0.0.1", remove=(worker.id,)), KEY)
            left = await until(client, lambda found: not found or not found[0].serves)
            await until(client, lambda found: found == ())
            if left:
                break
        assert [(w.id, w.draining) for w in left] == [(worker.id, True)]
        await client.set_workers(add, KEY)
        (again,) = await until(client, lambda found: found and found[0].serves)
        assert again.id not in ids
        await client.close()
