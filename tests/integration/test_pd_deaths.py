"""Deaths and misfits at the engine's surface: named HTTP errors within a bound, on both sides, pages back."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from pair_kit import Pair, bootstrap, idle, start
from reference_kit import Truth, await_healthy

from pdtransfer.engines.reference.tiny_model import make_tiny_model

pytestmark = pytest.mark.nixl
WAITING = 4.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest.fixture
def pair(model: Path, tmp_path: Path) -> Iterator[Pair]:
    # A pool of four pages: one request of four pages takes all of it, always in the same order.
    made = Pair(model, tmp_path, WAITING, "--max-total-tokens", "64")
    try:
        yield made
    finally:
        made.stop()


def test_misfits_and_deaths_are_named_in_time_and_a_room_may_come_again(pair: Pair, model: Path) -> None:
    truth = Truth(model)
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
    assert time.monotonic() - began < WAITING + 3
    idle(pair.prefill)
    idle(pair.decode)

    # Decode dies while the prefill holds KV for it: the prefill answers by name and frees.
    with ThreadPoolExecutor(2) as pool:
        fields = pair.fields()
        both = [pool.submit(e.generate, first, 4, **fields) for e in (pair.decode,)]
        time.sleep(0.5)
        os.kill(pair.decode.info()["ranks"][0]["pid"], signal.SIGKILL)
        answer = both[0].result()
        assert answer.json()["error"]["type"] == "EngineDied", answer.text
        began = time.monotonic()
        waits = pair.prefill.generate(first, 4, **fields)
    assert waits.status_code in (500, 503) and waits.json()["error"]["type"], waits.text
    assert time.monotonic() - began < WAITING + 3
    assert pair.decode.process.wait(5) == 1
    idle(pair.prefill)


def test_a_full_decode_pool_queues_and_then_refuses_by_name(model: Path, tmp_path: Path) -> None:
    decode = start(model, tmp_path, "decode", WAITING, "--max-total-tokens", "64", "--queue-timeout", "1")
    prefill = start(model, tmp_path, "prefill", WAITING)
    try:
        await_healthy(prefill)
        await_healthy(decode)
        end = time.monotonic() + 20
        while True:  # until the roster is there: then the first request holds the whole pool and waits
            holder: list[httpx.Response] = []
            thread = threading.Thread(
                target=lambda h=holder: h.append(decode.generate(list(range(3, 60)), 4, **bootstrap(prefill)))
            )
            thread.start()
            thread.join(0.5)
            if thread.is_alive():
                break
            assert holder[0].json()["error"]["type"] == "PeerNotRostered" and time.monotonic() < end
        answer = decode.generate([5, 6], 4, **bootstrap(prefill))
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "QueueTimeout")
        thread.join(WAITING + 5)
        assert holder[0].json()["error"]["type"] == "DeadlineExceeded"
        idle(decode)
    finally:
        prefill.stop()
        decode.stop()
