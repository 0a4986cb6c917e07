"""Whole engines as processes, not disaggregated: answers against transformers, HTTP behaviour, life and death."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from reference_kit import Running, Truth, await_end, frozen, launch
from tokenizers import Tokenizer

PAGE = 8
FLAGS = ("--page-size", str(PAGE), "--chunked-prefill-size", "16", "--max-running-requests", "4")


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("engine") / "log"
    running = launch(tiny, log, *FLAGS, "--tp-size", str(request.param), "--max-total-tokens", "512")
    try:
        yield running
    finally:
        code = running.stop()
    assert code == 0, log.read_text()


@pytest.fixture(scope="module")
def codec(tiny: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny / "tokenizer.json"))


def running(engine: Running) -> None:
    """Wait until a request runs."""
    until = time.monotonic() + 60
    while engine.get("/get_load").json()[0]["num_reqs"] == 0:
        assert time.monotonic() < until
        time.sleep(0.01)


def idle(engine: Running) -> None:
    """Every page is back."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        load = engine.get("/get_load").json()[0]
        if load["num_held_reqs"] == 0 and load["pages_free"] == load["pages_total"]:
            return
        time.sleep(0.05)
    raise AssertionError(load)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 16, 17, 50])
def test_greedy_tokens_equal_transformers(engine: Running, truth: Truth, length: int) -> None:
    prompt, expected = truth.decided(length, 12)
    answer = engine.generate(prompt, 12).json()
    assert answer["output_ids"] == expected
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (length, 12)


def test_more_requests_than_places_and_pages_are_all_answered_right(engine: Running, truth: Truth) -> None:
    cases = [truth.decided(10 + 9 * i, 10, seed=3) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: engine.generate(case[0], 10).json(), cases))
    assert [a["output_ids"] for a in answers] == [tokens for _, tokens in cases]
    idle(engine)


def test_log_probabilities_equal_transformers(engine: Running, truth: Truth) -> None:
    prompt, expected = truth.decided(11, 4)
    meta = engine.generate(prompt, 4, return_logprob=True, top_logprobs_num=3).json()["meta_info"]
    wanted = truth.logits([*prompt, *expected]).log_softmax(-1)[len(prompt) - 1 : -1]
    for row, (logprob, token, _), top in zip(
        wanted, meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        assert logprob == pytest.approx(float(row[token]), abs=1e-3)
        best = row.topk(3)
        assert [t for _, t, _ in top] == best.indices.tolist()
        assert [p for p, _, _ in top] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_text_is_tokenized_and_detokenized_by_the_checkpoints_tokenizer(engine: Running, codec: Tokenizer) -> None:
    text = "What is the capital of the country?"
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 9}}
    answer = engine.post("/generate", body).json()
    assert answer["meta_info"]["prompt_tokens"] == len(codec.encode(text).ids)
    assert answer["text"] == codec.decode(answer["output_ids"])


def test_a_stream_grows_to_the_whole_answer_and_ends_with_done(engine: Running, truth: Truth) -> None:
    prompt, expected = truth.decided(9, 6)
    params = {"temperature": 0, "max_new_tokens": 6}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    with httpx.stream("POST", engine.url + "/generate", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert [c["output_ids"] for c in chunks] == [expected[: i + 1] for i in range(6)]
    assert [c["meta_info"]["finish_reason"] is None for c in chunks] == [True] * 5 + [False]


def test_a_client_that_leaves_a_stream_frees_its_pages(engine: Running) -> None:
    params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    body = {"input_ids": [5, 6], "sampling_params": params, "stream": True}
    with httpx.stream("POST", engine.url + "/generate", json=body, timeout=60) as response:
        next(response.iter_lines())
    idle(engine)


def test_abort_request_ends_a_running_request(engine: Running) -> None:
    with ThreadPoolExecutor(1) as pool, frozen(engine):
        answer = pool.submit(engine.generate, [5, 6], 100, rid="long-one")
        running(engine)
        assert engine.post("/abort_request", {"rid": "long-one"}).status_code == 200
        assert answer.result().json()["error"]["type"] == "Aborted"
    idle(engine)


def test_stop_string_cuts_the_text_and_stop_token_ends_the_answer(
    engine: Running, truth: Truth, codec: Tokenizer
) -> None:
    prompt, expected = truth.decided(13, 12)
    whole = codec.decode(expected)
    cut = next(c for c in whole[3:] if c.isalpha())
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "stop": [cut]}
    answer = engine.post("/generate", {"input_ids": prompt, "sampling_params": params}).json()
    assert answer["text"] == whole[: whole.index(cut)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": cut}
    params = {"temperature": 0, "max_new_tokens": 12, "stop_token_ids": [expected[4]]}
    answer = engine.post("/generate", {"input_ids": prompt, "sampling_params": params}).json()
    assert answer["output_ids"] == expected[: expected.index(expected[4]) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": expected[4]}
    idle(engine)


def test_a_seeded_draw_repeats_and_another_seed_differs(engine: Running) -> None:
    def draw(seed: int) -> list[int]:
        params = {"temperature": 2.0, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": [9, 8, 7], "sampling_params": params}
        return list(engine.post("/generate", body).json()["output_ids"])

    assert draw(1) == draw(1) != draw(2)


def test_a_batch_is_answered_in_order(engine: Running, truth: Truth) -> None:
    cases = [truth.decided(n, 5) for n in (4, 20)]
    answers = engine.post(
        "/generate",
        {"input_ids": [c[0] for c in cases], "sampling_params": {"temperature": 0, "max_new_tokens": 5}},
    ).json()
    assert [a["output_ids"] for a in answers] == [c[1] for c in cases]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "exactly one of text and input_ids"),
        ({"input_ids": []}, "prompt is empty"),
        ({"input_ids": [512]}, "0 .. 511"),
        ({"input_ids": [1] * 2048}, "context length is 2048"),
        ({"input_ids": [1] * 9, "sampling_params": {"max_new_tokens": 2040}}, "exceed the context length of 2048"),
        ({"input_ids": [1] * 9, "sampling_params": {"max_new_tokens": 600}}, "the pool has 64"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens must be in 1"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature must be a number"),
        ({"input_ids": [1], "sampling_params": {"frequency_penalty": 1.0}}, "not supported"),
        ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": 129}, "0 .. 128"),
    ],
)
def test_a_wrong_request_is_400_and_says_why(engine: Running, body: dict[str, Any], words: str) -> None:
    answer = engine.post("/generate", body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_openai_completions_and_chat_give_the_same_tokens_as_generate(engine: Running) -> None:
    text = "Pages of the cache"
    params = {"temperature": 0, "max_new_tokens": 7}
    native = engine.post("/generate", {"text": text, "sampling_params": params}).json()
    body = {"model": "m", "prompt": text, "temperature": 0, "max_tokens": 7}
    answer = engine.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == native["text"]
    assert answer["usage"]["completion_tokens"] == 7 and answer["choices"][0]["finish_reason"] == "length"
    with httpx.stream("POST", engine.url + "/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line][:-1]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == native["text"]
    native = engine.post("/generate", {"text": "user: hi\nassistant:", "sampling_params": params}).json()
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 7}
    answer = engine.post("/v1/chat/completions", chat).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": native["text"]}


def test_health_ready_and_model_routes(engine: Running, tiny: Path) -> None:
    for path in ("/health", "/health_generate", "/ready"):
        assert engine.get(path).status_code == 200
    assert engine.get("/v1/models").json()["data"][0]["id"] == str(tiny)
    for path in ("/model_info", "/get_model_info"):
        assert engine.get(path).json()["is_generation"] is True


def test_server_info_is_what_the_ranks_really_hold(engine: Running) -> None:
    info = engine.info()
    assert info == {**engine.get("/get_server_info").json(), "internal_states": info["internal_states"]}
    ranks = info["ranks"]
    assert len(ranks) == info["tp_size"] and all(Path(f"/proc/{r['pid']}").exists() for r in ranks)
    # 4 layers, K and V, 64 pages of 8 tokens, 2 heads over the ranks, 16 dims, 4 bytes
    assert sum(r["kv_bytes"] for r in ranks) == 4 * 2 * 64 * PAGE * 2 * 16 * 4
    assert (info["page_size"], info["kv_cache_dtype"], info["max_total_tokens"]) == (PAGE, "float32", 512)


def test_death_of_a_rank_ends_the_whole_group_at_once(tiny: Path, tmp_path: Path) -> None:
    engine = launch(tiny, tmp_path / "log", *FLAGS, "--tp-size", "2")
    pids = [r["pid"] for r in engine.info()["ranks"]]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, [5, 6], 1500)
        running(engine)
        os.kill(pids[1], signal.SIGKILL)
        assert engine.process.wait(60) == 1  # the step's deadline is longer
        assert answer.result().json()["error"]["type"] == "EngineDied"
    await_end(pids)


def test_a_stuck_rank_and_then_its_death_end_the_group(tiny: Path, tmp_path: Path) -> None:
    """The other rank is surely inside an all-reduce: its partner was stopped while a request ran."""
    engine = launch(tiny, tmp_path / "log", *FLAGS, "--tp-size", "2")
    pids = [r["pid"] for r in engine.info()["ranks"]]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, [5, 6], 1500)
        running(engine)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.5)
        assert not answer.done() and engine.process.poll() is None
        os.kill(pids[1], signal.SIGKILL)
        assert engine.process.wait(60) == 1  # the step's deadline is longer
        assert answer.result().json()["error"]["type"] == "EngineDied"
    await_end(pids)


def test_a_rank_that_is_stuck_ends_the_engine_at_the_steps_deadline(tiny: Path, tmp_path: Path) -> None:
    engine = launch(tiny, tmp_path / "log", *FLAGS, "--step-timeout", "3")
    (rank,) = engine.info()["ranks"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, [5, 6], 1500)
        running(engine)
        os.kill(rank["pid"], signal.SIGSTOP)
        found = answer.result().json()["error"]
    assert found["type"] == "EngineDied" and "stuck" in found["message"]
    assert engine.process.wait(60) == 1
    await_end([rank["pid"]])


def test_death_of_the_leader_ends_the_ranks(tiny: Path, tmp_path: Path) -> None:
    engine = launch(tiny, tmp_path / "log", *FLAGS, "--tp-size", "2")
    pids = [r["pid"] for r in engine.info()["ranks"]]
    engine.process.kill()
    engine.process.wait(60)
    await_end(pids)


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tiny: Path, truth: Truth, tmp_path: Path) -> None:
    prompt, expected = truth.decided(6, 8)
    engine = launch(tiny, tmp_path / "log", *FLAGS, "--drain-timeout", "120")
    incarnation = engine.info()["incarnation"]
    with ThreadPoolExecutor(1) as pool:
        with frozen(engine):  # it runs for as long as the others are asked
            answer = pool.submit(engine.generate, prompt, 200)
            running(engine)
            engine.process.send_signal(signal.SIGTERM)
            until = time.monotonic() + 60
            while engine.get("/ready").status_code == 200 and time.monotonic() < until:
                time.sleep(0.01)
            assert engine.get("/ready").status_code == 503 and engine.get("/health").status_code == 200
            refused = engine.generate([1], 1)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "Draining")
            assert not answer.done()
        found = answer.result().json()["output_ids"]
    assert len(found) == 200 and found[:8] == expected
    assert engine.process.wait(60) == 0
    again = launch(tiny, tmp_path / "log2", *FLAGS)
    assert again.info()["incarnation"] != incarnation
    assert again.stop() == 0


def test_bfloat16_weights_and_float16_kv_are_what_the_facts_say(tiny: Path, tmp_path: Path) -> None:
    engine = launch(tiny, tmp_path / "log", "--dtype", "bfloat16", "--kv-cache-dtype", "float16")
    info = engine.info()
    assert (info["dtype"], info["kv_cache_dtype"]) == ("bfloat16", "float16")
    assert len(engine.generate([5, 6, 7], 5).json()["output_ids"]) == 5
    assert engine.stop() == 0
