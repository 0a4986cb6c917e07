"""Removes everything of a cluster, and finds whatever might be left of one."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from . import cgroups
from .errors import ClusterError
from .paths import Layout
from .processes import Processes, all_pids, marked


def down(layout: Layout) -> None:
    """Ends every process, then removes control groups and files. The lock must be held."""
    left = Processes(layout).kill_all()
    if left:
        raise ClusterError(
            f"these processes don't end: {', '.join(map(str, left))}",
            hint="look at them with ps; one in state D waits for a disk or the kernel",
        )
    if groups := cgroups.remove_all(layout.cluster_id):
        raise ClusterError(f"control groups can't be removed: {', '.join(map(str, groups))}")
    if layout.root.exists():
        # A mount below the state would mean that removing it removes the host's own files.
        if mounts := _mounts_below(layout, "self"):
            raise ClusterError(
                f"something is still mounted: {', '.join(mounts)}",
                hint="unmount it (umount -l), then run down again",
            )
        subprocess.run(
            ["rm", "-rf", "--one-file-system", str(layout.root)],
            check=True,
            timeout=120,
        )
    layout.lock.unlink(missing_ok=True)


def leaks(layout: Layout) -> list[str]:
    """What of the cluster exists on the host, in words; nothing after a good `down`."""
    found = [f"process {pid}: {_command(pid)}" for pid in marked(layout)]
    found += [f"control group {folder}" for folder in cgroups.find_all(layout.cluster_id)]
    for pid in all_pids():
        for mount in _mounts_below(layout, str(pid)):
            found.append(f"mount {mount} in the namespace of process {pid}")
    if layout.root.exists():
        found.append(f"files in {layout.root}")
    # Links and tables live in the cluster's own network namespaces, never in the host's.
    found += [f"network link {name}" for name in _host_links()]
    found += [f"nftables table {name}" for name in _host_tables()]
    return found


def _mounts_below(layout: Layout, pid: str) -> list[str]:
    try:
        lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    except OSError:
        return []
    points = [line.split()[4] for line in lines]
    return [point for point in points if Path(point).is_relative_to(layout.root)]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return words.decode("utf-8", "replace")[:120].strip()
    return "(ended)"


def _host_links() -> list[str]:
    names = [path.name for path in Path("/sys/class/net").iterdir()]
    return [name for name in names if name.startswith("veth-")]


def _host_tables() -> list[str]:
    try:
        done = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return []
    return [line for line in done.stdout.splitlines() if line.endswith(" kube-proxy")]
