"""What the fault tests and the comparison do to a pair, each with the proof that it happened."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import httpx
from kit_pair import Pair
from kit_server import CHUNK, Server, body

LONG = 3000
"""Tokens of a prompt whose KV is under way when the fault comes: 47 chunks."""
BEGUN = 3
"""Chunks that prefill has computed by then."""


@dataclass(frozen=True)
class Heard:
    """What one client heard, and when."""

    seconds: float
    status: int
    """HTTP status; 0: the connection ended without an answer, -1: nothing within the deadline."""
    text: str


def heard(answer: Callable[[], httpx.Response], began: float) -> Heard:
    """Wait for an answer; every way to get none is told apart."""
    try:
        got = answer()
    except httpx.TimeoutException as error:
        return Heard(time.monotonic() - began, -1, repr(error))
    except httpx.TransportError as error:
        return Heard(time.monotonic() - began, 0, repr(error))
    return Heard(time.monotonic() - began, got.status_code, got.text)


def kill_scheduler(server: Server, rank: int = 0) -> float:
    """SIGKILL to one scheduler process; when it was (monotonic seconds). It did end."""
    pid = server.schedulers()[rank]
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    while pid in server.members():
        if time.monotonic() - began > 10:
            raise AssertionError(f"scheduler {pid} outlived SIGKILL")
        time.sleep(0.01)
    return began


def begin_long(
    both: Pair, prompt: list[int], new: int, timeout: float, begun: int = BEGUN
) -> tuple[Future[httpx.Response], Future[httpx.Response]]:
    """Send a long request to both; returns when prefill has computed `begun` of its chunks, and not all."""
    since = both.prefill.said()
    prefill, decode = both.begin(prompt, new, timeout)
    both.prefill.await_output("Prefill batch", since, times=begun)
    if prefill.done() or decode.done():
        raise AssertionError(f"answered before the fault: {[f.result().text for f in (prefill, decode) if f.done()]}")
    return prefill, decode


def leave_while_prefill_computes(both: Pair, prompt: list[int]) -> None:
    """Both clients close their connections while prefill is at the prompt's first chunks."""
    since = both.prefill.said()
    fields = both.fields()
    with asking(both.decode, prompt, **fields), asking(both.prefill, prompt, **fields):
        both.prefill.await_output("Prefill batch", since, times=BEGUN)
    computed = both.prefill.log.read_bytes()[since:].count(b"Prefill batch")
    if computed >= len(prompt) // CHUNK:
        raise AssertionError(f"prefill had computed all {computed} chunks when the clients left")


@contextlib.contextmanager
def asking(server: Server, prompt: list[int], **fields: object) -> Iterator[None]:
    """A client whose request is sent, and who closes the connection at the end without reading an answer."""
    asked = json.dumps(body(prompt, 8, **fields)).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {server.url}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
        line.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
        yield
