"""Real SGLang servers with our backend, and what goes wrong in production: each fault ends in an answer with a reason
within a deadline, nothing stays held, and the next request is served. Each test proves that its fault happened."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from kit_faults import LONG, Heard, heard, kill_scheduler, leave_while_prefill_computes, long_under_way
from kit_model import make_model
from kit_pair import PDCLUSTER, Pair, pair
from kit_server import PAGE, Server, Setting, asking, running
from reference_kit import Truth

pytestmark = pytest.mark.timeout(3600)
NEW = 8
KNOWN_S = 45.0
"""Seconds until both clients have to know."""
AGAIN_S = 60.0
"""Seconds until the pair serves again once both sides are healthy."""
Known = tuple[list[int], list[int]]
"""A prompt and its greedy tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    return Truth(model)


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(Setting(model, "", backend=PDCLUSTER), tmp_path_factory.mktemp("pair"), 1, 1) as both:
        yield both


@pytest.fixture
def known(both: Pair, truth: Truth) -> Known:
    """The pair serves it before the fault."""
    prompt, expected = truth.decided(2 * PAGE + 5, NEW)
    assert both.tokens(prompt, NEW) == expected
    return prompt, expected


def both_heard(answers: tuple[Future[httpx.Response], ...], began: float) -> tuple[Heard, Heard]:
    """(prefill's client, decode's client), both within the deadline."""
    said = heard(answers[0].result, began), heard(answers[1].result, began)
    assert all(s.status != -1 and s.seconds < KNOWN_S for s in said), said
    return said


def test_a_client_that_leaves_while_decode_answers_frees_its_pages(both: Pair, known: Known) -> None:
    with both.stream(known[0], LONG) as events:
        first = next(event for event in events if event["output_ids"])
        assert first["meta_info"]["finish_reason"] is None, first  # 2999 tokens are to come
    both.decode.await_idle()
    both.prefill.await_idle()
    assert both.tokens(known[0], NEW) == known[1]


def test_a_client_that_leaves_while_decode_waits_for_prefill_frees_its_pages(both: Pair, known: Known) -> None:
    with asking(both.decode, known[0], **both.fields()):
        both.decode.await_held("decode_transfer_queue_reqs")  # its pages are allocated, prefill was never asked
    both.decode.await_idle()
    assert both.tokens(known[0], NEW) == known[1]


def test_a_client_that_leaves_while_prefill_waits_for_decode_is_forgotten(both: Pair, known: Known) -> None:
    with asking(both.prefill, known[0], **both.fields()):
        both.prefill.await_held("prefill_bootstrap_queue_reqs")
    both.prefill.await_idle()
    assert both.tokens(known[0], NEW) == known[1]


def test_clients_that_leave_while_kv_is_under_way_free_all_pages(both: Pair, known: Known) -> None:
    leave_while_prefill_computes(both)
    both.decode.await_idle()
    both.prefill.await_idle()
    assert both.tokens(known[0], NEW) == known[1]


def test_a_decode_that_can_not_fit_is_refused_by_name_and_lives(
    both: Pair, known: Known, model: Path, tmp_path: Path
) -> None:
    """Another page size. SGLang's common code raises in decode's scheduler for it, and that ends decode."""
    misfit = Server(replace(both.decode.setting, page=2 * PAGE), tmp_path)
    with running(misfit):
        answer = Pair(both.prefill, misfit).begin(known[0], NEW, timeout=KNOWN_S)[1].result()
        assert answer.status_code != 200 and "page" in answer.text, answer.text
        assert misfit.healthy() and both.prefill.healthy()
        assert both.tokens(known[0], NEW) == known[1]


def test_a_killed_prefill_scheduler_is_told_to_decodes_client_and_its_successor_serves(
    both: Pair, known: Known
) -> None:
    with long_under_way(both, NEW, timeout=KNOWN_S) as answers:
        began = kill_scheduler(both.prefill)
    _, decode = both_heard(answers, began)
    assert decode.status >= 500, decode
    # By name: prefill as an engine, or as the bootstrap server it is found by.
    assert any(f"127.0.0.1:{port}" in decode.text for port in (both.prefill.port, both.prefill.bootstrap_port)), decode
    both.decode.await_idle(AGAIN_S)
    both.prefill.stop()
    both.prefill.start()
    both.prefill.await_healthy()
    both.serve_again(known[0], known[1], AGAIN_S)


def test_a_killed_decode_scheduler_frees_prefill_and_its_successor_serves_with_another_tp(
    both: Pair, known: Known
) -> None:
    with long_under_way(both, NEW, timeout=KNOWN_S) as answers:
        began = kill_scheduler(both.decode)
    prefill, decode = both_heard(answers, began)
    assert prefill.status >= 500 and decode.status != 200, (prefill, decode)
    both.prefill.await_idle(AGAIN_S)
    both.decode.stop()
    both.decode.setting = replace(both.decode.setting, tp=2)
    both.decode.start()  # on the same address
    both.decode.await_healthy()
    both.serve_again(known[0], known[1], AGAIN_S)
