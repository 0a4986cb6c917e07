"""Faults between real prefill and decode processes: every request ends with a named error, pages come back,
and a peer that returns serves again. Each test proves that its fault happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from pair_kit import Pair, idle
from reference_kit import Running, Truth, await_healthy

pytestmark = pytest.mark.nixl
WAITING = 6.0


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(model, tmp_path_factory.mktemp("pair"), WAITING)
    try:
        yield made
    finally:
        made.stop()


def waiting(pool: ThreadPoolExecutor, pair: Pair, engine: Running) -> Future[httpx.Response]:
    """A request to one side only, that surely waits for the other side."""
    future = pool.submit(engine.generate, [5, 6, 7], 4, **pair.fields())
    end = time.monotonic() + 60
    while engine.get("/get_load").json()[0]["num_reqs"] == 0:
        assert time.monotonic() < end, "it does not run"
        time.sleep(0.02)
    assert not future.done()
    return future


def test_a_frozen_prefill_rank_does_not_hang_decodes_requests(pair: Pair, truth: Truth) -> None:
    prompt, expected = truth.decided(20, 4)
    pair.serve(prompt, expected)
    pid = pair.prefill.info()["ranks"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        answer = pair.decode.generate(prompt, 4, **pair.fields())
        assert answer.status_code in (500, 503) and answer.json()["error"]["type"], answer.text
        assert 0.5 < time.monotonic() - started < WAITING + 45
    finally:
        os.kill(pid, signal.SIGCONT)
    pair.serve(prompt, expected)
    idle(pair.decode)


def test_faults_end_requests_by_name_and_the_pair_serves_again(pair: Pair, truth: Truth) -> None:
    prompt, expected = truth.decided(33, 6)
    pair.serve(prompt, expected)

    # Nobody comes for the KV: both sides give up at their own deadline, named, with all pages back.
    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        alone = [waiting(pool, pair, e) for e in (pair.prefill, pair.decode)]
        answers = [f.result() for f in alone]
    assert [a.status_code for a in answers] == [500, 500]
    assert [a.json()["error"]["type"] for a in answers] == ["DeadlineExceeded", "DeadlineExceeded"]
    assert time.monotonic() - started < WAITING + 45
    idle(pair.prefill)
    idle(pair.decode)

    # The prefill dies while decode waits for it: decode answers long before any deadline, and lives on.
    with ThreadPoolExecutor(1) as pool:
        future = waiting(pool, pair, pair.decode)
        os.kill(pair.prefill.info()["ranks"][0]["pid"], signal.SIGKILL)
        answer = future.result()
    # Not DeadlineExceeded: it did not wait for that.
    assert answer.json()["error"]["type"] in ("PeerUnreachable", "PeerReplaced"), answer.text
    assert answer.status_code == 503
    assert pair.prefill.process.wait(60) == 1
    pair.prefill = pair.start("prefill")
    await_healthy(pair.prefill)
    pair.serve(prompt, expected)
    idle(pair.decode)

    # The decode dies and returns: the prefill serves its new incarnation.
    pair.decode.process.kill()
    pair.decode.process.wait(60)
    pair.decode = pair.start("decode")
    await_healthy(pair.decode)
    pair.serve(prompt, expected)
    idle(pair.prefill)
