"""Starts an engine with pdtransfer on its path: python3 pdtransfer_launch.py -m MODULE ARGUMENT...

It runs in the engine's image and replaces itself by the engine. A PYTHONPATH in the pod's manifest would replace the
image's own; this script adds to it. It looks whether the image has what the plugin needs, since SGLang only logs that a
plugin could not be loaded and then calls the backend's name an invalid choice.

Python 3.7 must be able to read this file, so that one that is too old is told so: no newer syntax, nothing but the
standard library.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

LEAST_PYTHON = (3, 11)
NEEDED = ("nixl", "numpy", "pydantic", "torch")
PLUGIN = "pdcluster"
WRONG_IMAGE = 78
"""Exit status (EX_CONFIG): this image can not run the plugin, and trying again will not help."""


def problem(python: tuple[int, ...], module: str, found: Callable[[str], bool]) -> str:
    """Why this image can not run the plugin, empty if it can. `found` tells whether a module can be imported."""
    if python < LEAST_PYTHON:
        have, want = (".".join(str(n) for n in number[:2]) for number in (python, LEAST_PYTHON))
        return f"its Python is {have}, and {want} or newer is needed"
    missing = [name for name in (*NEEDED, module.partition(".")[0]) if not found(name)]
    if missing:
        return f"its Python ({sys.executable}) has no module {', '.join(missing)}"
    return ""


def environment(old: Mapping[str, str], folder: str) -> dict[str, str]:
    """The engine's environment: `folder` first on the path, and the plugin among the allowed where some are named."""
    new = dict(old)
    rest = [part for part in old.get("PYTHONPATH", "").split(os.pathsep) if part and part != folder]
    new["PYTHONPATH"] = os.pathsep.join([folder, *rest])
    allowed = [name.strip() for name in old.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and PLUGIN not in allowed:
        new["SGLANG_PLUGINS"] = ",".join([*allowed, PLUGIN])
    return new


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def main(argv: list[str]) -> int:
    """Does not return where all is well: the engine runs in this process then."""
    if len(argv) < 2 or argv[0] != "-m":
        sys.stderr.write("usage: pdtransfer_launch.py -m MODULE ARGUMENT...\n")
        return 2
    why = problem(sys.version_info[:3], argv[1], _found)
    if why:
        sys.stderr.write(f"error: pdtransfer can not run in this engine image: {why}\n")
        return WRONG_IMAGE
    folder = str(Path(__file__).resolve().parent)
    return os.execve(sys.executable, [sys.executable, *argv], environment(os.environ, folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
