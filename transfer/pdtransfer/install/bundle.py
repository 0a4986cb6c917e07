"""What is installed beside an engine: the package, the metadata in which SGLang finds the plugin, the launcher.

Nothing else: numpy, pydantic, torch and NIXL are the engine image's own, and what lies on PYTHONPATH would hide them.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = "pdtransfer"
DISTRIBUTION = "pdcluster"
"""As on an index: an image that has this distribution already gives way to ours, it is first on the path."""
ENTRY_POINTS = "[sglang.srt.plugins]\npdcluster = pdtransfer.engines.sglang.plugin:register\n"
LAUNCHER = "pdtransfer_launch.py"
_UNKNOWN_VERSION = "0+source"
_LEFT_OUT = (".pyc", ".c", ".o")
_SHARED_OBJECTS = (".so", ".pyd", ".dylib")


@dataclass(frozen=True)
class Bundle:
    """Files by their path below the target, and the compiled ones among them. `skipped` are compiled files whose
    name does not say which Python they are for: one that they were not built for would load them."""

    files: dict[str, bytes]
    version: str
    compiled: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def record(self) -> str:
        """Path of the list of files, which holds a hash of each."""
        return f"{_info(self.version)}/RECORD"


def installed_version() -> str:
    """Version of the distribution this package is part of; `0+source` when it runs from a source tree."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return _UNKNOWN_VERSION


def collect(package: Path, number: str) -> Bundle:
    """The bundle of the package's folder, as version `number`."""
    files: dict[str, bytes] = {}
    compiled: list[str] = []
    skipped: list[str] = []
    for path in sorted(package.rglob("*")):
        inside = path.relative_to(package)
        if not path.is_file() or "__pycache__" in inside.parts or path.suffix in _LEFT_OUT:
            continue
        name = f"{PACKAGE}/{inside.as_posix()}"
        if path.suffix in _SHARED_OBJECTS:
            if not tagged(path.name):
                skipped.append(name)
                continue
            compiled.append(name)
        files[name] = path.read_bytes()
    files[LAUNCHER] = files[f"{PACKAGE}/install/{LAUNCHER}"]
    info = _info(number)
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {number}\n".encode()
    files[f"{info}/INSTALLER"] = b"pdtransfer.install\n"
    files[f"{info}/entry_points.txt"] = ENTRY_POINTS.encode()
    bundle = Bundle(files, number, tuple(compiled), tuple(skipped))
    files[bundle.record] = record(files, bundle.record)
    return bundle


def tagged(name: str) -> bool:
    """True for a compiled module whose name says which Pythons and platform it is for: any other overlooks it.
    `.abi3.so` is for this Python and later ones; a bare `.so` is for whoever finds it, and may crash them."""
    suffix = "." + name.partition(".")[2]
    return suffix in EXTENSION_SUFFIXES and suffix.count(".") == 2


def record(files: dict[str, bytes], itself: str) -> bytes:
    """A wheel's RECORD (PEP 376): path, hash and size of each file; its own line without the latter two."""
    lines = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in sorted(files.items())]
    return "".join(f"{line}\n" for line in [*lines, f"{itself},,"]).encode()


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _info(number: str) -> str:
    return f"{DISTRIBUTION}-{number}.dist-info"
