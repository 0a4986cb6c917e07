"""The suite with real SGLang: run on its own (`pytest tests/sglang`), never as a part of `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Only where this folder or a file of it was asked for."""
    asked = [Path(str(argument).split("::")[0]).resolve() for argument in config.invocation_params.args]
    return None if any(path == HERE or HERE in path.parents for path in asked) else True
