"""The engine is started in its own image: with our folder on the path, and nothing of the image's taken away."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdtransfer.install import pdtransfer_launch
from pdtransfer.install.pdtransfer_launch import environment, problem

SOURCE = Path(pdtransfer_launch.__file__)
ENGINE = """
import json, os, sys
names = ("PYTHONPATH", "SGLANG_PLUGINS", "OTHER")
print(json.dumps([os.getpid(), sys.argv[1:], [os.environ.get(n) for n in names]]))
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image's own folder of packages, with an engine that tells how it was started."""
    (tmp_path / "image" / "sglang").mkdir(parents=True)
    (tmp_path / "image" / "sglang" / "__init__.py").touch()
    (tmp_path / "image" / "sglang" / "launch_server.py").write_text(ENGINE)
    (tmp_path / "plugin").mkdir()
    shutil.copy(SOURCE, tmp_path / "plugin")
    return tmp_path / "image"


def launch(image: Path, *args: str, python: tuple[str, ...] = (), **env: str) -> tuple[int, int, str, str]:
    """(process id, exit status, what it printed, what it complained)."""
    command = [sys.executable, *python, str(image.parent / "plugin" / SOURCE.name), *args]
    full = {**os.environ, "PYTHONPATH": str(image), **env}
    with subprocess.Popen(command, env=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        out, err = run.communicate(timeout=60)
        return run.pid, run.returncode, out, err


def test_the_engine_takes_the_process_over_with_its_arguments(image: Path) -> None:
    pid, status, out, err = launch(image, "-m", "sglang.launch_server", "--tp-size", "2", "a b", OTHER="kept")
    assert (status, err) == (0, "")
    plugin = image.parent / "plugin"
    assert json.loads(out) == [pid, ["--tp-size", "2", "a b"], [f"{plugin}:{image}", None, "kept"]]


def test_an_image_without_what_the_plugin_needs_is_named_by_what_it_lacks(image: Path) -> None:
    _, status, out, err = launch(image, "-m", "sglang.launch_server", python=("-S",))
    assert (status, out) == (78, "")
    assert err == (
        f"error: pdtransfer can not run in this engine image: its Python ({sys.executable}) has no module "
        "nixl, numpy, pydantic, torch\n"
    )


def test_an_image_without_the_engine_is_named(image: Path) -> None:
    _, status, _, err = launch(image, "-m", "sgl0ng.launch_server")
    assert status == 78
    assert "has no module sgl0ng" in err


@pytest.mark.parametrize("args", [(), ("-m",), ("serve", "x")])
def test_bad_usage_is_told(image: Path, args: tuple[str, ...]) -> None:
    _, status, _, err = launch(image, *args)
    assert (status, err) == (2, "usage: pdtransfer_launch.py -m MODULE ARGUMENT...\n")


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ((3, 10, 12), "its Python is 3.10, and 3.11 or newer is needed"),
        ((3, 7, 0), "its Python is 3.7, and 3.11 or newer is needed"),
        ((3, 11, 0), ""),
        ((3, 13, 1), ""),
    ],
)
def test_an_old_python_is_told_so(python: tuple[int, ...], why: str) -> None:
    assert problem(python, "sglang.launch_server", lambda name: True) == why


def test_an_old_python_can_read_the_script() -> None:
    text = SOURCE.read_text()
    ast.parse(text, feature_version=(3, 7))
    with pytest.raises(SyntaxError):  # the check can fail
        ast.parse(text + "\nif (n := 1): pass\n", feature_version=(3, 7))


@pytest.mark.parametrize(
    ("old", "path", "plugins"),
    [
        ({}, "/p", None),
        ({"PYTHONPATH": "/a:/b"}, "/p:/a:/b", None),
        ({"PYTHONPATH": "/a:/p"}, "/p:/a", None),
        ({"SGLANG_PLUGINS": "metrics"}, "/p", "metrics,pdcluster"),
        ({"SGLANG_PLUGINS": " metrics , pdcluster"}, "/p", " metrics , pdcluster"),
        ({"SGLANG_PLUGINS": ""}, "/p", ""),
    ],
)
def test_path_and_allowed_plugins_are_added_to(old: dict[str, str], path: str, plugins: str | None) -> None:
    new = environment(old, "/p")
    assert new["PYTHONPATH"] == path
    assert new.get("SGLANG_PLUGINS") == plugins
