"""Faults between real prefill and decode processes: every request ends with a named error, pages come back,
and a peer that returns serves again. Each test proves that its fault happened."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from reference_kit import Running, Truth, await_healthy, launch

from pdtransfer.engines.reference.tiny_model import make_tiny_model

pytestmark = pytest.mark.nixl
_rooms = itertools.count(9000)
WAITING = 3.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


class Cluster:
    """One prefill and one decode that can be killed and started again under the same pod UID."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.prefill, self.decode = self.start("prefill"), self.start("decode")
        await_healthy(self.prefill)
        await_healthy(self.decode)

    def start(self, role: str) -> Running:
        return launch(
            self.model,
            self.folder / f"{role}-{time.monotonic_ns()}.log",
            *("--disaggregation-mode", role, "--pod-uid", f"uid-{role}"),
            *("--peers-file", str(self.folder / "cards"), "--kv-waiting-timeout", str(WAITING)),
            wait=False,
        )

    def fields(self) -> dict[str, Any]:
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": next(_rooms),
        }

    def ask(self, prompt: list[int], new: int) -> tuple[httpx.Response, httpx.Response]:
        fields = self.fields()
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(e.generate, prompt, new, **fields) for e in (self.prefill, self.decode)]
            return both[0].result(), both[1].result()

    def await_answers(self, prompt: list[int], expected: list[int]) -> None:
        """Ask until the pair serves; a wrong answer is never retried."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            _, answer = self.ask(prompt, len(expected))
            if answer.status_code == 200:
                assert answer.json()["output_ids"] == expected
                return
            assert answer.json()["error"]["type"], answer.text
            time.sleep(0.2)
        raise AssertionError(answer.text)


@pytest.fixture
def cluster(model: Path, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(model, tmp_path)
    try:
        yield cluster
    finally:
        cluster.prefill.stop()
        cluster.decode.stop()


def idle(engine: Running, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        load = engine.get("/get_load").json()[0]
        if load["num_held_reqs"] == 0 and load["pages_free"] == load["pages_total"]:
            return
        time.sleep(0.1)
    raise AssertionError(load)


def waiting(pool: ThreadPoolExecutor, cluster: Cluster, engine: Running) -> Future[httpx.Response]:
    """A request to one side only, that surely waits for the other side."""
    future = pool.submit(engine.generate, [5, 6, 7], 4, **cluster.fields())
    end = time.monotonic() + 5
    while engine.get("/get_load").json()[0]["num_reqs"] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    assert not future.done()
    return future


def test_faults_end_requests_by_name_and_the_pair_serves_again(cluster: Cluster, model: Path) -> None:
    truth = Truth(model)
    prompt, expected = truth.decided(33, 6)
    cluster.await_answers(prompt, expected)

    # Nobody comes for the KV: both sides give up at their own deadline, named, with all pages back.
    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        alone = [waiting(pool, cluster, e) for e in (cluster.prefill, cluster.decode)]
        answers = [f.result() for f in alone]
    assert [a.status_code for a in answers] == [500, 500]
    assert [a.json()["error"]["type"] for a in answers] == ["DeadlineExceeded", "DeadlineExceeded"]
    assert time.monotonic() - started < WAITING + 5
    idle(cluster.prefill)
    idle(cluster.decode)

    # The prefill dies while decode waits for it: decode answers long before any deadline, and lives on.
    with ThreadPoolExecutor(1) as pool:
        future = waiting(pool, cluster, cluster.decode)
        os.kill(cluster.prefill.info()["ranks"][0]["pid"], signal.SIGKILL)
        died = time.monotonic()
        answer = future.result()
    assert answer.json()["error"]["type"] in ("PeerUnreachable", "PeerReplaced"), answer.text
    assert answer.status_code == 503 and time.monotonic() - died < WAITING
    assert cluster.prefill.process.wait(5) == 1
    cluster.prefill = cluster.start("prefill")
    await_healthy(cluster.prefill)
    cluster.await_answers(prompt, expected)
    idle(cluster.decode)

    # The decode dies and returns: the prefill serves its new incarnation.
    cluster.decode.process.kill()
    cluster.decode.process.wait(5)
    cluster.decode = cluster.start("decode")
    await_healthy(cluster.decode)
    cluster.await_answers(prompt, expected)
    idle(cluster.prefill)


def test_a_frozen_prefill_rank_does_not_hang_decodes_requests(cluster: Cluster, model: Path) -> None:
    prompt, expected = Truth(model).decided(20, 4)
    cluster.await_answers(prompt, expected)
    pid = cluster.prefill.info()["ranks"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        answer = cluster.decode.generate(prompt, 4, **cluster.fields())
        assert answer.status_code in (500, 503) and answer.json()["error"]["type"], answer.text
        assert 0.5 < time.monotonic() - started < WAITING + 10
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.await_answers(prompt, expected)
    idle(cluster.decode)
