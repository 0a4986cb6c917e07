"""Real SGLang servers, prefill and decode apart: the tokens are those of transformers in float32, which computes each
of them from the whole text without any KV cache. First SGLang's stock backend (that proves the harness), then ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from kit_model import make_model
from kit_pair import NIXL_DRAM, PDCLUSTER, Pair, pair, router
from kit_probe import probe
from kit_server import CHUNK, PAGE, Setting, body
from reference_kit import Truth

from pdoperator.cli import main as pdcluster
from pdoperator.domain.realprobe import ProbeOutcome

pytestmark = pytest.mark.timeout(3600)
NEW = 8
BORDERS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7, 1000)
"""Prompt lengths: around a page, around a chunk, several chunks, many."""
SHAPES = {
    "stock-nixl-with-dram-hook-tp1-tp1": (NIXL_DRAM, 1, 1),
    "pdcluster-tp2-tp1": (PDCLUSTER, 2, 1),
    "pdcluster-tp1-tp2": (PDCLUSTER, 1, 2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    return Truth(model)


@pytest.fixture(scope="module", params=SHAPES, ids=list(SHAPES))
def both(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    backend, prefill_tp, decode_tp = SHAPES[request.param]
    folder = tmp_path_factory.mktemp("pair")
    with pair(Setting(model, "", backend=backend), folder, prefill_tp, decode_tp) as both:
        yield both


def test_tokens_equal_transformers_at_page_and_chunk_borders(both: Pair, truth: Truth) -> None:
    for length in BORDERS:
        prompt, expected = truth.decided(length, NEW)
        prefill, decode = both.ask(prompt, NEW)
        assert decode.status_code == 200, f"{length} tokens: {decode.text}; prefill: {prefill.text}"
        assert decode.json()["output_ids"] == expected, f"{length} tokens"
        assert prefill.json()["output_ids"] == expected[:1], f"{length} tokens"


def test_a_prefix_that_prefill_has_cached_arrives_as_well(both: Pair, truth: Truth) -> None:
    prompt, expected = truth.decided(5 * PAGE + 3, NEW, seed=3)
    assert both.tokens(prompt, NEW) == expected
    prefill, decode = both.ask(prompt, NEW)
    assert prefill.json()["meta_info"]["cached_tokens"] == 5 * PAGE, "prefill must not have computed it again"
    assert decode.json()["output_ids"] == expected


def test_concurrent_requests_keep_their_own_kv(both: Pair, truth: Truth) -> None:
    cases = [truth.decided(length, NEW, seed=1) for length in (5, 33, 100, 257, 400, 700)]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: both.tokens(case[0], NEW), cases))
    assert answers == [tokens for _, tokens in cases]


def test_the_real_router_serves_the_pair(both: Pair, truth: Truth, tmp_path: Path) -> None:
    with router(both, tmp_path) as url:
        for length in (5, PAGE, 2 * CHUNK + 5):
            prompt, expected = truth.decided(length, NEW, seed=2)
            answer = httpx.post(url + "/generate", json=body(prompt, NEW), timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["output_ids"] == expected


def test_the_operators_request_is_served_and_preflight_reads_both_servers(
    both: Pair, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = probe(both, 120.0)
    assert result.outcome is ProbeOutcome.SERVED, result.message
    urls = ["--server", both.decode.url, "--server", both.prefill.url]
    code = pdcluster(["preflight", *urls, "--model-config", str(model / "config.json"), "-o", "json"])
    out = json.loads(capsys.readouterr().out)
    assert code == 0, [f for f in out["findings"] if f["status"] == "Fail"]
    facts = {role: out[role]["facts"] for role in ("prefill", "decode")}
    assert facts["prefill"]["route_registered"] is True
    assert [facts[r]["engine_version"] for r in facts] == ["0.5.23", "0.5.23"]
    assert [facts[r]["page_size"] for r in facts] == [PAGE, PAGE]
    assert facts["decode"]["disable_radix_cache"] is True and facts["prefill"]["chunked_prefill_size"] == CHUNK


def test_nothing_is_held_when_all_requests_have_ended(both: Pair) -> None:
    # After the tests above; SGLang's own count of what its memory pool lent.
    both.decode.await_idle()
    both.prefill.await_idle()
