"""Tests against the installed SGLang: run by `make test-sglang` with SGLang's own Python, and by nothing else."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:
    from tests.sglang.plugin_sidecar import Sidecar
    from tests.sglang.plugin_world import World

# The kit_* modules beside the tests.
sys.path.insert(0, str(Path(__file__).parent))

# `make test` runs in an environment without SGLang; there this folder is empty. Where `tests` is on the path this very
# folder is found as a namespace package of that name, which has no origin.
_found = importlib.util.find_spec("sglang")
collect_ignore_glob = [] if _found is not None and _found.origin else ["*"]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """What the plugin writes into the environment of an engine is no other test's."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """SGLang's engines in one process, without an operator."""
    from tests.sglang.plugin_world import world  # it imports SGLang

    with world(monkeypatch) as made:
        yield made


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[World, Sidecar]]:
    """The same under an operator, of which they see a sidecar."""
    from tests.sglang.plugin_sidecar import Sidecar
    from tests.sglang.plugin_world import world

    path = tmp_path / "sidecar.sock"
    sidecar = Sidecar(path)
    with world(monkeypatch, {"PDTRANSFER_SOCKET": str(path)}) as made:
        yield made, sidecar
    sidecar.close()
