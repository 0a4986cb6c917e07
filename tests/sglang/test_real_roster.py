"""Real SGLang behind real sidecars, as in the operator's pods: rosters say who may exchange KV, before any request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from kit_faults import kill_scheduler
from kit_model import make_model
from kit_pair import PDCLUSTER, Pair, pair
from kit_pods import Sidecar, until, wire
from kit_server import CHUNK, PAGE, Server, Setting, running
from reference_kit import Truth

pytestmark = pytest.mark.timeout(3600)
NEW = 8
REFUSED_S = 30.0
"""A peer that nobody named is told so within this, not after a timeout of minutes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    return Truth(model)


@pytest.fixture(scope="module")
def known(truth: Truth) -> tuple[list[int], list[int]]:
    return truth.decided(3 * PAGE + 5, NEW)


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sidecar]]:
    roles = {"prefill": "prefill", "decode": "decode", "stranger": "decode"}
    made = {name: Sidecar(role, tmp_path_factory.mktemp(name), f"uid-{name}") for name, role in roles.items()}
    yield made
    for sidecar in made.values():
        sidecar.stop()


@pytest.fixture(scope="module")
def both(model: Path, sidecars: dict[str, Sidecar], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    variables = [sidecars[name].variables() for name in ("prefill", "decode")]
    folder = tmp_path_factory.mktemp("pair")
    with pair(Setting(model, "", backend=PDCLUSTER), folder, 2, 1, *variables) as both:
        yield both


def test_before_a_roster_names_prefill_decode_refuses_it_by_name(
    both: Pair, known: tuple[list[int], list[int]]
) -> None:
    answer = both.decode.generate(known[0], NEW, REFUSED_S, **both.fields())
    assert answer.status_code >= 500 and "PeerNotRostered" in answer.text, answer.text


def test_rosters_wire_the_ranks_and_the_first_request_is_served(
    both: Pair, sidecars: dict[str, Sidecar], truth: Truth, known: tuple[list[int], list[int]]
) -> None:
    wire(sidecars["prefill"], sidecars["decode"], counter=1)
    assert both.tokens(known[0], NEW) == known[1]
    proven = sidecars["decode"].verdicts().verdicts
    assert len(proven) == 2 and all(v.checksum_ok for v in proven)  # prefill has two ranks
    for length in (1, PAGE, PAGE + 1, CHUNK + 1, 1000):
        prompt, expected = truth.decided(length, NEW)
        assert both.tokens(prompt, NEW) == expected, f"{length} tokens"
    until(sidecars["decode"].ready, "decode is ready")
    until(sidecars["prefill"].ready, "prefill is ready")


def test_a_decode_outside_the_roster_is_refused_by_name_while_the_others_serve(
    both: Pair, sidecars: dict[str, Sidecar], known: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    variables = sidecars["stranger"].variables()
    stranger = Server(replace(both.decode.setting, variables=variables), tmp_path)
    with running(stranger):
        # It names prefill on its own side, so that only prefill's roster can refuse.
        sidecars["stranger"].put_roster(sidecars["prefill"].cards(), counter=1)
        outside = Pair(both.prefill, stranger).begin(known[0], NEW, timeout=REFUSED_S)[1].result()
        assert outside.status_code >= 500 and "Roster" in outside.text, outside.text
        assert both.tokens(known[0], NEW) == known[1]


def test_a_prefill_whose_scheduler_died_is_not_ready_and_serves_again_when_its_successor_is_named(
    both: Pair, sidecars: dict[str, Sidecar], known: tuple[list[int], list[int]]
) -> None:
    before = sidecars["prefill"].cards().incarnation
    kill_scheduler(both.prefill)
    until(lambda: not sidecars["prefill"].ready(), "prefill's sidecar says that it is not ready")
    both.prefill.stop()
    both.prefill.start()
    both.prefill.await_healthy()
    after = until(sidecars["prefill"].whole_cards, "cards of the successor").incarnation
    assert after != before
    wire(sidecars["prefill"], sidecars["decode"], counter=2)
    assert both.tokens(known[0], NEW) == known[1]
