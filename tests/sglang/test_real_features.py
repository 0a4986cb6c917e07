"""Real SGLang servers with our backend and what production switches on: pipeline stages, data-parallel replicas, a
decode that keeps prefixes, requests that decode retracts. The tokens are those of transformers in float32.

Not here, since SGLang 0.5.23 can not run it on a CPU: decode's host receive. The CUDA runtime pins its host pool
(mem_cache/pool_host/common.py, `_cuda_host_register`: "Found no NVIDIA driver"), 10 GiB have to be free beside it
(mem_cache/hicache_auto_size.py), and kernels of sgl_kernel copy it. test_plugin_shapes.py has it on SGLang's classes.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from kit_model import make_model
from kit_pair import Pair, pair
from kit_server import CHUNK, PAGE, Server, Setting
from reference_kit import Truth

pytestmark = pytest.mark.timeout(3600)
NEW = 8
BORDERS = (1, PAGE, PAGE + 1, CHUNK + 1, 1000)
"""Prompt lengths. The last one comes in 16 chunks, which go through the pipeline one behind the other."""
RETRACTED, RETRACTED_NEW = 100, 200
"""Tokens of the prompt and of the answer: long enough for decode to be told to retract while it answers."""
TRIES = 5
EVERY, PHASE, PHASES = 9, 0.007, 8
"""Steps between two commands to retract, and how many seconds each comes later within a step than the one before, so
many times."""


@dataclass(frozen=True)
class Shape:
    """Flags of both sides, and how the output of each names its ranks."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_ranks: tuple[str, ...]
    decode_ranks: tuple[str, ...]


STAGES, REPLICAS = ("--pp-size", "2"), ("--dp-size", "2")
DECODE = ("--disaggregation-decode-enable-radix-cache", "--decode-log-interval", "1")
"""It keeps prefixes, and says each step."""
SHAPES = {
    "stages2-to-one": Shape(STAGES, DECODE, ("PP0", "PP1"), ("",)),
    "stages2-to-stages2": Shape(STAGES, (*STAGES, *DECODE), ("PP0", "PP1"), ("PP0", "PP1")),
    "replicas2-to-replicas2": Shape(REPLICAS, (*REPLICAS, *DECODE), ("DP0", "DP1"), ("DP0", "DP1")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    return Truth(model)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def both(shape: Shape, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    flags = {"prefill_flags": shape.prefill, "decode_flags": shape.decode}
    with pair(Setting(model, ""), tmp_path_factory.mktemp("pair"), 1, 1, **flags) as both:
        yield both


def test_tokens_equal_transformers_at_page_and_chunk_borders(both: Pair, truth: Truth) -> None:
    for length in BORDERS:
        prompt, expected = truth.decided(length, NEW)
        prefill, decode = both.ask(prompt, NEW)
        assert decode.status_code == 200, f"{length} tokens: {decode.text}; prefill: {prefill.text}"
        assert decode.json()["output_ids"] == expected, f"{length} tokens"


def test_concurrent_requests_keep_their_own_kv(both: Pair, truth: Truth) -> None:
    cases = [truth.decided(length, NEW, seed=1) for length in (5, 33, 100, 257, 400, 700)]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: both.tokens(case[0], NEW), cases))
    assert answers == [tokens for _, tokens in cases]


def test_a_prefix_that_decode_has_is_not_sent_again(both: Pair, shape: Shape, truth: Truth) -> None:
    prompt, expected = truth.decided(5 * PAGE + 3, NEW, seed=3)
    longer = [*prompt, *truth.decided(2 * CHUNK, 1, seed=4)[0]]
    for replica in range(shape.decode.count("--dp-size") + 1):
        for asked, tokens, held in ((prompt, expected, 0), (longer, truth.greedy(longer, NEW)[0], 5 * PAGE)):
            _, decode = both.ask(asked, NEW, **routed(both, shape, replica))
            assert decode.json()["output_ids"] == tokens
            assert decode.json()["meta_info"]["cached_tokens"] == held, "tokens that decode had"


def routed(both: Pair, shape: Shape, replica: int) -> dict[str, int]:
    """Fields of a request that this replica of each side serves: prefill's has the rooms of its number."""
    if "--dp-size" not in shape.decode:
        return {}
    rooms = (both.fields()["bootstrap_room"] for _ in range(2))
    return {"bootstrap_room": next(r for r in rooms if r % 2 == replica), "routed_dp_rank": replica}


def test_every_rank_served(both: Pair, shape: Shape) -> None:
    """After the one above, which asks every replica."""
    for server, ranks in ((both.prefill, shape.prefill_ranks), (both.decode, shape.decode_ranks)):
        for rank in ranks:
            assert re.search(rf"[\d:]+ ?{rank}\] (Prefill|Decode) batch", server.log.read_text()), (
                server.setting,
                rank,
            )


def test_a_request_that_decode_retracts_is_computed_again_in_its_room(both: Pair, truth: Truth) -> None:
    """As for an update of weights: decode gives the pages back, and asks prefill by itself for the same room.

    SGLang retracts what is in the micro batch at which the command arrives (scheduler.py pause_generation looks at
    running_batch, scheduler_pp_mixin.py makes that one micro batch's). With stages there are several, so a command
    may find the other one, and is given again at other moments of a step."""
    for n in range(TRIES):
        prompt, expected = truth.decided(RETRACTED, RETRACTED_NEW, seed=5 + n)
        with both.stream(prompt, RETRACTED_NEW) as events:
            for number, last in enumerate(event for event in events if event["output_ids"]):
                if number % EVERY == 0 and not last["meta_info"]["num_retractions"]:
                    time.sleep(PHASE * (number // EVERY % PHASES))
                    command(both.decode, "pause_generation", mode="retract")
                    command(both.decode, "continue_generation")
        assert last["output_ids"] == expected
        if last["meta_info"]["num_retractions"] == 1:
            return
    raise AssertionError(f"decode did not retract once in any of {TRIES} answers")


def test_nothing_is_held_when_all_requests_have_ended(both: Pair) -> None:
    # After the tests above; SGLang's own count of what its memory pool lent.
    both.decode.await_idle()
    both.prefill.await_idle()


def command(server: Server, what: str, **how: str) -> None:
    httpx.post(f"{server.url}/{what}", json=how, timeout=30).raise_for_status()
