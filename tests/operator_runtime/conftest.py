"""Puts the shared doubles (runtime_world) on the path: importlib mode does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_world import fresh

from pdoperator.kube.fake import FakeKube


@pytest.fixture
def kube() -> FakeKube:
    """An empty API server."""
    return fresh()


def _api_fixtures() -> Any:
    """The real API server's fixtures of tests/api, from their one place."""
    path = Path(__file__).parents[1] / "api" / "conftest.py"
    spec = importlib.util.spec_from_file_location("pdcluster_apiserver_fixtures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_fixtures = _api_fixtures()
apiserver = _fixtures.apiserver
crd_server = _fixtures.crd_server
