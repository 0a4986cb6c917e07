"""Deaths and misfits at the engine's surface: named HTTP errors within a bound, on both sides, pages back."""

from __future__ import annotations

import itertools
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

from reference_kit import Running, Truth, await_healthy, launch

from pdtransfer.engines.reference.tiny_model import make_tiny_model

pytestmark = pytest.mark.nixl
_rooms = itertools.count(70_000)
WAITING = 4.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


def start(model: Path, folder: Path, role: str, *flags: str) -> Running:
    return launch(
        model,
        folder / f"{role}-{time.monotonic_ns()}.log",
        *("--disaggregation-mode", role, "--pod-uid", f"uid-{role}", "--peers-file", str(folder / "cards")),
        *("--kv-waiting-timeout", str(WAITING), "--page-size", "16", *flags),
        wait=False,
    )


class Pair:
    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.prefill = start(model, folder, "prefill")
        # A pool of four pages: one request of four pages takes all of it, always in the same order.
        self.decode = start(model, folder, "decode", "--max-total-tokens", "64")
        await_healthy(self.prefill)
        await_healthy(self.decode)

    def fields(self, room: int | None = None) -> dict[str, object]:
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": next(_rooms) if room is None else room,
        }

    def ask(self, prompt: list[int], new: int, room: int | None = None) -> tuple[httpx.Response, httpx.Response]:
        fields = self.fields(room)
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(e.generate, prompt, new, **fields) for e in (self.prefill, self.decode)]
            return both[0].result(), both[1].result()

    def serve(self, prompt: list[int], expected: list[int], room: int | None = None) -> None:
        """Ask until the pair serves; a wrong answer is never retried."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            _, answer = self.ask(prompt, len(expected), room)
            if answer.status_code == 200:
                assert answer.json()["output_ids"] == expected
                return
            assert answer.json()["error"]["type"], answer.text
            time.sleep(0.2)
        raise AssertionError(answer.text)


@pytest.fixture
def pair(model: Path, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(model, tmp_path)
    try:
        yield made
    finally:
        made.prefill.stop()
        made.decode.stop()


def idle(engine: Running, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while True:
        load = engine.get("/get_load").json()[0]
        if load["num_held_reqs"] == 0 and load["pages_free"] == load["pages_total"]:
            return
        assert time.monotonic() < end, load
        time.sleep(0.1)


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
    decode = start(model, tmp_path, "decode", "--max-total-tokens", "64", "--queue-timeout", "1")
    prefill = start(model, tmp_path, "prefill")
    try:
        await_healthy(prefill)
        await_healthy(decode)
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
        end = time.monotonic() + 20
        while True:  # until the roster is there: then the first request holds the whole pool and waits
            holder: list[httpx.Response] = []
            thread = threading.Thread(
                target=lambda h=holder: h.append(
                    decode.generate(list(range(3, 60)), 4, bootstrap_room=next(_rooms), **fields)
                )
            )
            thread.start()
            thread.join(0.5)
            if thread.is_alive():
                break
            assert holder[0].json()["error"]["type"] == "PeerNotRostered" and time.monotonic() < end
        answer = decode.generate([5, 6], 4, bootstrap_room=next(_rooms), **fields)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "QueueTimeout")
        thread.join(WAITING + 5)
        assert holder[0].json()["error"]["type"] == "DeadlineExceeded"
        idle(decode)
    finally:
        prefill.stop()
        decode.stop()
