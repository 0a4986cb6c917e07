"""Puts the shared doubles (tests_operator_runtime) on the path: importlib mode does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tests_operator_runtime import NOW

from pdoperator.kube.fake import FakeKube


@pytest.fixture
def kube() -> FakeKube:
    """An empty API server."""
    return FakeKube(now=lambda: NOW)
