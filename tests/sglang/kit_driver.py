"""Asks SGLang: runs a driver of this folder (*_driver.py) with SGLang's own Python, JSON in and JSON out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kit_machine import TREE, cpu_variables, environment


def ask_driver(driver: str, question: Any, seconds: float) -> Any:
    """The driver's answer, within so many seconds."""
    home = environment()
    if home is None:
        pytest.fail("SGLang's environment is not there: run make sglang-env")
    done = subprocess.run(
        [str(home / "bin" / "python"), "-W", "ignore", str(Path(__file__).with_name(driver))],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **cpu_variables()},
        cwd=TREE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
