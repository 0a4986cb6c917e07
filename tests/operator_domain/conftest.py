"""Puts what the tests share (domain_world, preflight_kit) on the path: importlib mode does not. Fixtures of `pdcluster
preflight` from outside."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdoperator.cli import main

sys.path.insert(0, str(Path(__file__).parent))

from preflight_kit import LLAMA, Run, Serve, Server


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The path of a config.json of LLAMA."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return str(file)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `pdcluster preflight`: (exit code, parsed JSON), or what it says where it can not read the input."""

    def do(*argv: str) -> tuple[int, Any]:
        code = main(["preflight", *argv, "-o", "json"])
        said = capsys.readouterr()
        return code, said.err if code == 2 else json.loads(said.out)

    return do


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a Server of these pages; all are closed at the end."""
    made: list[Server] = []

    def start(pages: dict[str, Any]) -> Server:
        made.append(Server(pages))
        return made[-1]

    yield start
    for server in made:
        server.close()
