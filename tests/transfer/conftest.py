"""Makes this folder's helper modules importable (importlib mode adds no folder to the path)."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kv_world import World
from nixl_ranks import Ranks


@pytest.fixture
def world() -> Iterator[World]:
    """Endpoints over the fake agent; closed at the end."""
    made = World()
    yield made
    made.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Rank processes over real NIXL; killed at the end."""
    made = Ranks()
    yield made
    for rank in made.all:
        rank.end()
