"""What the fault tests and the comparison do to a pair, each with the proof that it happened."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import httpx
from kit_model import VOCABULARY
from kit_pair import Pair
from kit_server import CHUNK, Server, asking

LONG = 3000
"""Tokens of a prompt whose KV is under way when the fault comes: 47 chunks."""
BEGUN = 3
"""Chunks that prefill has computed by then."""
TRIES = 5
_seeds = itertools.count(1)


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


@contextlib.contextmanager
def long_under_way(both: Pair, new: int, timeout: float) -> Iterator[tuple[Future[httpx.Response], ...]]:
    """The answers to come to a long request whose first chunks prefill has computed. It stands still until the block
    ends, so that the fault comes in time however slow the tests are. Its prompt was never seen before: what prefill
    has cached it would not compute again."""
    for _ in range(TRIES):
        since = both.prefill.said()
        answers = both.begin(_new_prompt(), new, timeout)
        both.prefill.await_output("Prefill batch", since, times=BEGUN)
        with _still(both.prefill):
            if _under_way(both, since):
                yield answers
                return
        for answer in answers:
            answer.result()
    raise AssertionError(f"prefill had computed all of the prompt before it stood still, {TRIES} times")


def leave_while_prefill_computes(both: Pair) -> None:
    """Both clients close their connections while prefill is at a long prompt's first chunks."""
    for _ in range(TRIES):
        since, prompt, fields = both.prefill.said(), _new_prompt(), both.fields()
        # It goes on when both have left: contexts end in reverse order.
        with (
            contextlib.ExitStack() as after,
            asking(both.decode, prompt, **fields),
            asking(both.prefill, prompt, **fields),
        ):
            both.prefill.await_output("Prefill batch", since, times=BEGUN)
            after.enter_context(_still(both.prefill))
            under_way = _under_way(both, since)
        if under_way:
            return
    raise AssertionError(f"prefill had computed all of the prompt before it stood still, {TRIES} times")


def _new_prompt() -> list[int]:
    return random.Random(next(_seeds)).choices(range(3, VOCABULARY), k=LONG)


def _under_way(both: Pair, since: int) -> bool:
    return both.prefill.log.read_bytes()[since:].count(b"Prefill batch") < LONG // CHUNK


@contextlib.contextmanager
def _still(server: Server) -> Iterator[None]:
    """Its schedulers do not run."""
    found = server.schedulers()
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
