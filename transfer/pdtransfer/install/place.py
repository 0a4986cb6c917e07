"""Puts a bundle at its place: whole or not at all, and only where it is not there already."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pdtransfer.install.bundle import Bundle

_SCRATCH = ".pdtransfer-"
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755
"""Whatever the umask: the engine runs as another user."""


def place(bundle: Bundle, target: Path) -> bool:
    """True when the files were written, False when `target` held exactly them.

    A folder beside the target is filled first and then takes its name. What a run that was killed left there goes
    away. Raises OSError where the volume can not be written, FileExistsError where `target` holds something that
    no run of this program made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent):
        for left in target.parent.glob(f"{_SCRATCH}*.tmp"):
            shutil.rmtree(left)
        if holds(bundle, target):
            return False
        if target.exists() and not _ours(target):
            raise FileExistsError(f"{target} holds other files than pdtransfer's: give a folder of its own")
        fresh = Path(tempfile.mkdtemp(prefix=_SCRATCH, suffix=".tmp", dir=target.parent))
        _write(bundle, fresh)
        if target.exists():
            target.rename(fresh.with_name(f"{fresh.name.removesuffix('.tmp')}-old.tmp"))
        fresh.rename(target)
        for left in target.parent.glob(f"{_SCRATCH}*.tmp"):
            shutil.rmtree(left)
    return True


def holds(bundle: Bundle, target: Path) -> bool:
    """True when `target` holds the bundle's files, byte by byte, and no others."""
    found = {path.relative_to(target).as_posix(): path for path in target.rglob("*") if not path.is_dir()}
    return found.keys() == bundle.files.keys() and all(
        not path.is_symlink() and path.read_bytes() == bundle.files[name] for name, path in found.items()
    )


def _ours(target: Path) -> bool:
    """An earlier version of ours, or an empty folder."""
    return target.is_dir() and (not any(target.iterdir()) or any(target.glob("pdcluster-*.dist-info/RECORD")))


def _write(bundle: Bundle, folder: Path) -> None:
    for name, content in bundle.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(_FILE_MODE)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        path.chmod(_FOLDER_MODE)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One run at a time in `folder`; the lock goes with the process that holds it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
