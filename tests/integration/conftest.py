"""Makes what the Reference engine's tests share importable (the suite runs in importlib mode), and the fixtures: a tiny
checkpoint and the independent implementation that knows its answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from reference_kit import Truth

from pdtransfer.engines.reference.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def truth(model: Path) -> Truth:
    """`transformers` on that checkpoint."""
    return Truth(model)
