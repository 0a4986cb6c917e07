"""H12: who limits top_logprobs. SGLang's request models and its router (sglang_router) are run; the router's workers
are doubles that only note what reaches them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pdtransfer.contract.compat.endpoints import TOP_LOGPROBS
from tests.free_ports import free_port

READY_S = 60.0
MANY = TOP_LOGPROBS + 72
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": MANY},
    "/v1/completions": {"prompt": "x", "logprobs": MANY},
    "/generate": {"text": "x", "return_logprob": True, "top_logprobs_num": MANY},
}


class Worker(ThreadingHTTPServer):
    """Answers everything, and notes what was posted."""

    daemon_threads = True

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def _send(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._send({"model_path": "m", "served_model_name": "m", "model_id": "m", "is_generation": True})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        assert isinstance(self.server, Worker)
        self.server.posted.append((self.path, body))
        self._send({"text": "x", "meta_info": {"id": "1"}, "choices": []})

    def log_message(self, *_: Any) -> None:
        """Not in the test's output."""


@pytest.fixture(scope="module")
def router() -> Iterator[tuple[str, Worker]]:
    """(its address, its prefill worker)"""
    prefill, decode = Worker(), Worker()
    port, metrics = free_port(), free_port()
    workers = [f"http://127.0.0.1:{w.server_port}" for w in (prefill, decode)]
    argv = ["--pd-disaggregation", "--prefill", workers[0], "8998", "--decode", workers[1]]
    argv += ["--host", "127.0.0.1", "--prometheus-port", str(metrics)]
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_router.launch_router", *argv, "--port", f"{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + READY_S
        while _status(f"{address}/readiness") != 200:
            assert process.poll() is None and time.monotonic() < end, "the router does not become ready"
            time.sleep(0.1)
        yield address, prefill
    finally:
        process.kill()
        process.wait(10)
        for worker in (prefill, decode):
            worker.shutdown()
            worker.server_close()


def _status(url: str, body: dict[str, Any] | None = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_the_router_passes_any_number_on(router: tuple[str, Worker], path: str) -> None:
    address, prefill = router
    assert _status(address + path, {"model": "m", **PATHS[path]}) == 200
    where, body = prefill.posted[-1]
    name = "logprobs" if path == "/v1/completions" else "top_logprobs_num"
    assert where == path and body[name] == MANY


def test_the_router_refuses_more_than_20_in_chat_requests(router: tuple[str, Worker]) -> None:
    address, prefill = router
    before = len(prefill.posted)
    body = {"model": "m", **PATHS["/v1/chat/completions"]}
    assert _status(f"{address}/v1/chat/completions", body) == 400
    assert _status(f"{address}/v1/chat/completions", body | {"top_logprobs": 21}) == 400
    assert len(prefill.posted) == before
    assert _status(f"{address}/v1/chat/completions", body | {"top_logprobs": 20}) == 200
    assert len(prefill.posted) == before + 1


def test_sglang_itself_takes_any_number() -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.managers.io_struct import GenerateReqInput

    chat = ChatCompletionRequest(model="m", **PATHS["/v1/chat/completions"])
    assert chat.top_logprobs == MANY
    assert CompletionRequest(model="m", **PATHS["/v1/completions"]).logprobs == MANY
    generate = GenerateReqInput(**PATHS["/generate"])
    generate.normalize_batch_and_arguments()
    assert generate.top_logprobs_num == MANY
