"""Folders of the host that the nodes' containers see, read-only, below /host.

A Python environment with torch is several gigabytes: instead of packing it
into an image, each node has a small tree of bind mounts which containerd's
base runtime specification mounts at /host in every container. An image that
wants them links to them (see image_set.py); any other image is unaffected.

The tree's own folders are mode 0755, so that a user other than root gets to a
folder whose parents on the host (/root, say) are closed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from .errors import ClusterError
from .paths import Layout


def ensure_shared(layout: Layout, node: str, init_pid: int, folders: Iterable[Path]) -> None:
    """Mounts each host folder at the same path below the node's tree, unless it's there."""
    seen_from_host = Path(f"/proc/{init_pid}/root")
    for folder in folders:
        target = layout.node(node) / "host" / folder.relative_to("/")
        seen = seen_from_host / target.relative_to("/")
        seen.mkdir(mode=0o755, parents=True, exist_ok=True)
        if _same(folder, seen):
            continue
        # A folder that was removed and made again is another one: the old mount still shows
        # the removed one, and is taken away first.
        script = (
            'if mountpoint -q "$2"; then umount -l "$2"; fi; '
            'mount --bind "$1" "$2" && mount -o remount,bind,ro,nosuid "$2"'
        )
        # In the process namespace too: mount and umount look into /proc/self, which is the node's.
        enter = ["nsenter", "--target", str(init_pid), "--mount", "--pid", "--"]
        command = [*enter, "sh", "-c", script, "sh", str(folder), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            raise ClusterError(f"{folder} can't be shared with {node}: {done.stderr.strip()}")


def remember(layout: Layout, folders: Iterable[Path]) -> None:
    """Adds to the folders that a node gets when it starts again."""
    every = dict.fromkeys([*remembered(layout), *folders])
    _file(layout).write_text("".join(f"{folder}\n" for folder in every))


def remembered(layout: Layout) -> list[Path]:
    try:
        return [Path(line) for line in _file(layout).read_text().splitlines()]
    except FileNotFoundError:
        return []


def _file(layout: Layout) -> Path:
    return layout.root / "shared-folders"


def _same(left: Path, right: Path) -> bool:
    try:
        return left.samefile(right)
    except OSError:
        return False


def outermost(folders: Iterable[Path]) -> list[Path]:
    """The folders without those that lie in another of them (their mounts would hide)."""
    kept: list[Path] = []
    for folder in sorted(set(folders), key=lambda path: (len(path.parts), path)):
        if not any(folder.is_relative_to(other) for other in kept):
            kept.append(folder)
    return kept
