"""Deaths and misfits at the engine's surface: named HTTP errors within a bound, on both sides, pages back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pair_kit import Pair, idle
from reference_kit import Running, Truth

pytestmark = pytest.mark.nixl
WAITING = 8.0
"""Seconds: on a slow machine too a request still waits when the next one has run into the queue's deadline."""


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Decode has a pool of four pages: one request of four pages takes all of it, always in the same order."""
    flags = ("--max-total-tokens", "64", "--queue-timeout", "1.5")
    made = Pair(model, tmp_path_factory.mktemp("pair"), WAITING, *flags)
    try:
        yield made
    finally:
        made.stop()


def busy(engine: Running, **load: int) -> None:
    """Wait until the engine's load is this."""
    end = time.monotonic() + 60
    while not load.items() <= (found := engine.get("/get_load").json()[0]).items():
        assert time.monotonic() < end, found
        time.sleep(0.02)


def test_a_full_decode_pool_queues_and_then_refuses_by_name(pair: Pair, truth: Truth) -> None:
    pair.serve(*truth.decided(20, 4))  # the roster is there
    with ThreadPoolExecutor(1) as pool:
        # It holds the whole pool and waits for a prefill that is never asked.
        holder = pool.submit(pair.decode.generate, list(range(3, 60)), 4, **pair.fields())
        busy(pair.decode, pages_free=0)
        answer = pair.decode.generate([5, 6], 4, **pair.fields())
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "QueueTimeout")
        assert holder.result().json()["error"]["type"] == "DeadlineExceeded"
    idle(pair.decode)


def test_misfits_and_deaths_are_named_in_time_and_a_room_may_come_again(pair: Pair, truth: Truth) -> None:
    first, first_tokens = truth.decided(58, 4)
    other, other_tokens = truth.decided(60, 4, seed=3)
    pair.serve(first, first_tokens, room=1)

    # The same room again, for the same pages and as many tokens, after others used the pages.
    for _ in range(2):
        pair.serve(other, other_tokens)
        _, answer = pair.ask(first, 4, room=1)
        assert answer.status_code == 200 and answer.json()["output_ids"] == first_tokens, answer.text

    # A prompt that decode's pool can never hold: decode at once, prefill at its own deadline.
    began = time.monotonic()
    prefill, decode = pair.ask(list(range(3, 103)), 4)
    assert (decode.status_code, decode.json()["error"]["type"]) == (400, "PoolTooSmall")
    assert (prefill.status_code, prefill.json()["error"]["type"]) == (500, "DeadlineExceeded")
    assert time.monotonic() - began < WAITING + 45
    idle(pair.prefill)
    idle(pair.decode)

    # Decode dies while the prefill holds KV for it: the prefill answers by name and frees.
    with ThreadPoolExecutor(2) as pool:
        fields = pair.fields()
        both = [pool.submit(e.generate, first, 4, **fields) for e in (pair.decode,)]
        busy(pair.decode, num_reqs=1, pages_free=0)
        os.kill(pair.decode.info()["ranks"][0]["pid"], signal.SIGKILL)
        answer = both[0].result()
        assert answer.json()["error"]["type"] == "EngineDied", answer.text
        began = time.monotonic()
        waits = pair.prefill.generate(first, 4, **fields)
    assert waits.status_code in (500, 503) and waits.json()["error"]["type"], waits.text
    assert time.monotonic() - began < WAITING + 45
    assert pair.decode.process.wait(60) == 1
    idle(pair.prefill)
