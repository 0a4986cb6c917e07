"""Makes this folder's helper modules importable (importlib mode adds no folder to the path)."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kv_world import World
from nixl_ranks import Ranks
from places import HOST, PLACES, STAND_IN, Place, stand_in


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Where the pools of `world` lie: a test that takes it runs on each of them."""
    where: Place = request.param
    if where is STAND_IN:
        stand_in(monkeypatch)
    return where


@pytest.fixture(autouse=True)
def short_probes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe times each shape of WRITE several times: once is enough where the rates are not the subject."""
    if request.path.name != "test_calibration.py":
        monkeypatch.setattr("pdtransfer.session.scratch_moves.ROUNDS", (1, 1))


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Endpoints over the fake agent, in the test's place if it has one; closed at the end."""
    made = World(request.getfixturevalue("place") if "place" in request.fixturenames else HOST)
    yield made
    made.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Rank processes over real NIXL; killed at the end."""
    made = Ranks()
    yield made
    for rank in made.all:
        rank.end()
