"""Prefill and decode engines as real processes, KV over real NIXL on loopback, no Kubernetes: token-exact
against transformers and against an engine that is not disaggregated, directly and through the real router."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pair_kit import idle
from reference_kit import Running, Truth, await_healthy, free_port, launch

pytestmark = pytest.mark.nixl
PAGE = 16
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE, 70)
"""Chunks are two pages: the last two prompts travel in several chunks."""
NEW = 12
_rooms = itertools.count(1000)


@dataclass
class Pair:
    """A prefill and a decode engine that know each other through a folder of cards."""

    prefill: Running
    decode: Running

    def ask(self, prompt: list[int], new: int = NEW, **more: Any) -> tuple[httpx.Response, httpx.Response]:
        """The same request to both sides, as a router sends it: (prefill's answer, decode's answer)."""
        fields: dict[str, Any] = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": next(_rooms),
        }
        fields |= more
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(e.generate, prompt, new, **fields) for e in (self.prefill, self.decode)]
            return both[0].result(), both[1].result()


def start_pair(
    model: Path, folder: Path, prefill_tp: int, decode_tp: int, prefill_memory: str, *decode_flags: str
) -> Pair:
    """Start both and wait until they serve."""
    shared = ("--peers-file", str(folder / "cards"), "--page-size", str(PAGE), "--chunked-prefill-size", "32")
    prefill = launch(
        model,
        folder / "prefill.log",
        *shared,
        *("--disaggregation-mode", "prefill", "--tp-size", str(prefill_tp)),
        *("--kv-memory-kind", prefill_memory),
        wait=False,
    )
    decode = launch(
        model,
        folder / "decode.log",
        *shared,
        *("--disaggregation-mode", "decode", "--tp-size", str(decode_tp)),
        *("--kv-memory-kind", "mixed"),
        *decode_flags,
        wait=False,
    )
    await_healthy(prefill)
    await_healthy(decode)
    return Pair(prefill, decode)


SHAPES = {
    # prefill TP, decode TP, prefill's memory kinds; decode's are mixed: even layers VRAM (emulated), odd DRAM
    "tp2-vram-to-tp1-mixed": (2, 1, "vram-emulated"),
    "tp1-dram-to-tp2-mixed": (1, 2, "dram"),
}


@pytest.fixture(scope="module", params=SHAPES, ids=list(SHAPES))
def pair(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = start_pair(model, tmp_path_factory.mktemp("pair"), *SHAPES[request.param])
    try:
        await_rostered(pair)
        yield pair
    finally:
        codes = [e.stop() for e in (pair.prefill, pair.decode)]
    assert codes == [0, 0]


def test_answers_over_moved_kv_equal_transformers_at_page_borders(pair: Pair, truth: Truth) -> None:
    for length in LENGTHS:
        prompt, expected = truth.decided(length, NEW)
        prefill, decode = pair.ask(prompt)
        assert decode.status_code == 200, decode.text
        assert decode.json()["output_ids"] == expected
        assert prefill.status_code == 200 and prefill.json()["output_ids"] == expected[:1]


def await_rostered(pair: Pair) -> None:
    """The peers find each other within a poll of the folder; until then decode refuses by name, and prefill, which
    would wait for it, is told to give up, as a router does."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        room = next(_rooms)
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefill.bootstrap_port, "bootstrap_room": room}
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(pair.prefill.generate, [5], 1, rid=f"hello-{room}", **fields)
            answer = pair.decode.generate([5], 1, **fields)
            if answer.status_code == 200:
                assert sent.result().status_code == 200
                return
            assert answer.json()["error"]["type"] == "PeerNotRostered", answer.text
            while not sent.done():
                pair.prefill.post("/abort_request", {"rid": f"hello-{room}"})
                time.sleep(0.1)
    raise AssertionError(pair.decode.log.read_text())


def test_concurrent_requests_keep_their_own_kv(pair: Pair, truth: Truth) -> None:
    cases = [truth.decided(20 + 3 * i, NEW, seed=1) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda case: pair.ask(case[0])[1].json(), cases))
    assert [a["output_ids"] for a in answers] == [tokens for _, tokens in cases]
    for engine in (pair.prefill, pair.decode):
        idle(engine)


def test_answers_are_equal_through_staging_with_digests(model: Path, truth: Truth, tmp_path: Path) -> None:
    pair = start_pair(model, tmp_path, 2, 1, "vram-emulated", "--kv-strategy", "staged", "--kv-digest")
    try:
        await_rostered(pair)
        prompt, expected = truth.decided(70, NEW, seed=2)
        _, decoded = pair.ask(prompt)
        assert decoded.json().get("output_ids") == expected, decoded.text
    finally:
        codes = [e.stop() for e in (pair.prefill, pair.decode)]
    assert codes == [0, 0]


def test_log_probabilities_of_the_first_token_travel_with_the_kv(pair: Pair, truth: Truth) -> None:
    prompt, expected = truth.decided(18, 3)
    _, decode = pair.ask(prompt, 3, return_logprob=True, top_logprobs_num=2)
    meta = decode.json()["meta_info"]
    ids = [*prompt, *expected]
    wanted = truth.logits(ids).log_softmax(-1)
    for i, (logprob, token, _) in enumerate(meta["output_token_logprobs"]):
        assert token == expected[i]
        assert logprob == pytest.approx(float(wanted[len(prompt) + i - 1, token]), abs=1e-3)
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]


def test_an_unrostered_prefill_is_refused_at_once_by_name(pair: Pair) -> None:
    # At a deadline it would have that deadline's name.
    answer = pair.decode.generate([5, 6], 2, bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=next(_rooms))
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "PeerNotRostered")


def test_a_request_without_room_is_refused_as_sglang_does(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        answer = engine.generate([5, 6], 2)
        assert answer.status_code == 400 and "without bootstrap room id" in answer.json()["error"]["message"]


def test_different_prompts_in_one_room_are_an_error_and_never_an_answer(pair: Pair, truth: Truth) -> None:
    room = next(_rooms)
    fields = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": pair.prefill.bootstrap_port,
        "bootstrap_room": room,
    }
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(pair.prefill.generate, [9, 8, 7, 6], 4, **fields)
        decode = pair.decode.generate([9, 8, 7, 5], 4, **fields)
        prefill.result()
    assert decode.status_code == 500 and decode.json()["error"]["type"] == "PromptMismatch"


def test_a_client_that_leaves_gives_its_pages_back(pair: Pair) -> None:
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefill.bootstrap_port}
    # No prefill request comes for this room: decode waits until its client leaves.
    body = json.dumps({"input_ids": [5, 6, 7], "bootstrap_room": next(_rooms), **fields}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    until = time.monotonic() + 25  # less than the request would wait for its prefill
    with socket.create_connection(("127.0.0.1", pair.decode.port), 20) as client:
        client.sendall(head.encode() + body)
        while not pair.decode.get("/get_load").json()[0]["num_held_reqs"]:
            assert time.monotonic() < until, "the request did not come"
            time.sleep(0.01)
    while pair.decode.get("/get_load").json()[0]["num_held_reqs"]:
        assert time.monotonic() < until, "pages are still held"
        time.sleep(0.1)
    _, decode = pair.ask([5, 6, 7], 1)
    assert decode.status_code == 200


def test_facts_are_read_back_from_the_running_ranks(pair: Pair) -> None:
    info = pair.decode.info()
    assert info["disaggregation_mode"] == "decode" and info["page_size"] == PAGE
    assert info["tp_size"] == len(info["ranks"]) and len({r["pid"] for r in info["ranks"]}) == info["tp_size"]
    assert info["kv_memory_kinds"] == ["DRAM", "VRAM"] and info["emulated_vram"]


@pytest.fixture
def router(pair: Pair, tmp_path: Path) -> Iterator[str]:
    """The real router (smg) with the two engines as workers; its address."""
    port, metrics, key = free_port(), free_port(), "test-key"
    command = [
        str(Path(sys.executable).with_name("smg")),
        *("launch", "--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics), "--control-plane-api-keys", f"id:test:admin:{key}"),
        *("--health-check-interval-secs", "1", "--health-failure-threshold", "10"),
        *("--health-success-threshold", "1"),
    ]
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
    log = tmp_path / "smg.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: httpx.get(f"{url}/workers", headers=headers, timeout=20).status_code == 200, log)
        workers = [
            {"url": pair.prefill.url, "worker_type": "prefill", "bootstrap_port": pair.prefill.bootstrap_port},
            {"url": pair.decode.url, "worker_type": "decode"},
        ]
        for worker in workers:
            added = httpx.post(f"{url}/workers", json={**worker, "pairing_protocol": "a"}, headers=headers, timeout=30)
            assert added.status_code == 202, added.text
        wait_for(lambda: _healthy_workers(url, headers) == 2, log)
        yield url
    finally:
        process.kill()  # its own way out takes 5 s
        process.wait(60)


def _healthy_workers(url: str, headers: dict[str, str]) -> int:
    workers = httpx.get(f"{url}/workers", headers=headers, timeout=20).json()["workers"]
    return sum(w.get("is_healthy") is True or w.get("status") in ("ready", "healthy") for w in workers)


def wait_for(check: Any, log: Path, seconds: float = 90) -> None:
    """Block until `check()` is true."""
    until = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < until:
        try:
            last = check()
            if last:
                return
        except (httpx.TransportError, ValueError, KeyError) as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"{last!r}\n{log.read_text()[-3000:]}")


def test_through_the_real_router_answers_equal_transformers(pair: Pair, truth: Truth, router: str) -> None:
    for length in (5, PAGE, 50):
        prompt, expected = truth.decided(length, NEW, seed=2)
        params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        answer = httpx.post(f"{router}/generate", json={"input_ids": prompt, "sampling_params": params}, timeout=60)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        found = found[0] if isinstance(found, list) else found
        assert found["output_ids"] == expected


def test_openai_and_streams_through_the_real_router_give_the_same_answer(pair: Pair, truth: Truth, router: str) -> None:
    prompt, expected = truth.decided(30, NEW, seed=5)
    params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": params, "stream": True}
    with httpx.stream("POST", f"{router}/generate", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["output_ids"] == expected
    text = "Pages of the cache travel from rank to rank"
    native = httpx.post(f"{router}/generate", json={"text": text, "sampling_params": params}, timeout=60).json()
    native = native[0] if isinstance(native, list) else native
    model = pair.decode.info()["served_model_name"]
    common = {"model": model, "temperature": 0, "max_tokens": NEW, "ignore_eos": True}
    answer = httpx.post(f"{router}/v1/completions", json={"prompt": text, **common}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == native["text"]
    messages = [{"role": "user", "content": "hello"}]
    answer = httpx.post(f"{router}/v1/chat/completions", json={"messages": messages, **common}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == NEW
