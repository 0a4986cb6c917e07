"""SGLang's own NIXL backend, emulated: peers meet on the bootstrap port without a roster, and what that backend
can not do is refused by the rule's name instead of killing a thread."""

from __future__ import annotations

import itertools
import sys
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
_rooms = itertools.count(7000)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Running, Running, Running]]:
    """Prefill TP 2, a decode TP 1 with device memory, a decode TP 1 with host memory."""
    folder = tmp_path_factory.mktemp("nixl")
    make_tiny_model(folder / "model")

    def start(role: str, tp: int, memory: str) -> Running:
        return launch(
            folder / "model",
            folder / f"{role}-{memory}.log",
            *("--disaggregation-mode", role, "--tp-size", str(tp), "--kv-memory-kind", memory),
            *("--disaggregation-transfer-backend", "nixl"),
            wait=False,
        )

    started = [start("prefill", 2, "vram-emulated"), start("decode", 1, "vram-emulated"), start("decode", 1, "dram")]
    try:
        for engine in started:
            await_healthy(engine)
        yield folder / "model", *started
    finally:
        codes = [e.stop() for e in started]
    assert codes == [0, 0, 0]


def ask(prefill: Running, decode: Running, prompt: list[int], new: int) -> httpx.Response:
    fields = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": next(_rooms),
    }
    pool = ThreadPoolExecutor(1)
    pool.submit(prefill.generate, prompt, new, rid=str(fields["bootstrap_room"]), **fields)
    answer = decode.generate(prompt, new, **fields)
    # A router aborts the other side of a failed pair.
    prefill.post("/abort_request", {"rid": str(fields["bootstrap_room"])})
    pool.shutdown()
    return answer


def test_peers_meet_on_the_bootstrap_port_and_answers_equal_transformers(
    engines: tuple[Path, Running, Running, Running],
) -> None:
    model, prefill, decode, _ = engines
    truth = Truth(model)
    for length in (7, 40):
        prompt, expected = truth.decided(length, 8)
        answer = ask(prefill, decode, prompt, 8)
        assert answer.status_code == 200, answer.text
        assert answer.json()["output_ids"] == expected
    assert decode.info()["disaggregation_transfer_backend_emulated"] is True


def test_unequal_tp_into_host_memory_is_refused_by_the_rule_that_upstream_has(
    engines: tuple[Path, Running, Running, Running],
) -> None:
    _, prefill, _, decode = engines
    started = time.monotonic()
    answer = ask(prefill, decode, [5, 6, 7], 2)
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert error["type"] == "PeerUnreachable" and "F3" in error["message"], error
    assert time.monotonic() - started < 10


def test_a_bootstrap_address_where_nobody_listens_is_an_error_at_once(
    engines: tuple[Path, Running, Running, Running],
) -> None:
    *_, decode = engines
    answer = decode.generate([5], 1, bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=next(_rooms))
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "PeerUnreachable")
