"""The control groups of a node: made before it starts, removed after it ended.

Cgroup v1 has one hierarchy for each controller, and a node gets a group of
its own in each; cgroup v2 has one hierarchy. The groups lie below those of
the caller, so whatever limits hold for the caller hold for the node too.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError
from .processes import ProcessRecord, kill, start_time

ROOT = Path("/sys/fs/cgroup")
PREFIX = "pdcluster-"

# What containerd, runc and the kubelet use; hugetlb and the network classes aren't needed.
V1_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")
_V1_REQUIRED = ("cpu", "cpuset", "memory", "devices", "freezer", "pids")


@dataclass(frozen=True)
class Hierarchies:
    """The host's control group hierarchies: folder of each controller ("" for v2)."""

    version: int
    folders: dict[str, Path]


def is_v2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> Hierarchies:
    own = parse_own_groups(Path("/proc/self/cgroup").read_text())
    if is_v2():
        return Hierarchies(2, {"": _below(ROOT, own.get("", "/"))})
    folders = {
        name: _below(ROOT / name, own.get(name, "/"))
        for name in V1_CONTROLLERS
        if (ROOT / name / "cgroup.procs").exists()
    }
    missing = [name for name in _V1_REQUIRED if name not in folders]
    if missing:
        raise ClusterError(
            f"no cgroup v1 hierarchy is mounted for {', '.join(missing)}, nor is cgroup v2",
            hint="mount cgroup v2 on /sys/fs/cgroup, or the v1 controllers below it",
        )
    if (ROOT / "systemd" / "cgroup.procs").exists():
        folders["systemd"] = _below(ROOT / "systemd", own.get("name=systemd", "/"))
    return Hierarchies(1, folders)


def parse_own_groups(text: str) -> dict[str, str]:
    """/proc/self/cgroup as {controller: path}; the v2 hierarchy has the name ""."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _below(mount: Path, path: str) -> Path:
    # In a container the path may be the host's, which isn't visible here.
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount


def create(cluster_id: str, node: str) -> list[Path]:
    """Makes the node's groups and returns their folders."""
    found = hierarchies()
    made = []
    for name, parent in found.folders.items():
        cluster = parent / f"{PREFIX}{cluster_id}"
        for folder in (cluster, cluster / node):
            folder.mkdir(exist_ok=True)
            if name == "cpuset":  # v1 starts a group without CPUs: it could hold no process
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (folder / file).write_text((folder.parent / file).read_text())
            if name == "memory":  # v1 counts only a group's own processes without this
                with contextlib.suppress(OSError):
                    (folder / "memory.use_hierarchy").write_text("1")
        if found.version == 2:
            _delegate(parent)
            _delegate(cluster)
        made.append(cluster / node)
    return made


def _delegate(folder: Path) -> None:
    """Hands a v2 group's controllers to its children, one by one where some can't be."""
    for controller in (folder / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def leaf(folder: Path) -> Path:
    """Where a node's own processes live: v2 allows none in a group that has child groups."""
    return folder / "init" if is_v2() else folder


def settle(folders: list[Path]) -> None:
    """Once a node runs: moves its processes into the leaf and delegates controllers (v2)."""
    if not is_v2():
        return
    for folder in folders:
        leaf(folder).mkdir(exist_ok=True)
        for pid in _members(folder):
            with contextlib.suppress(OSError):
                (leaf(folder) / "cgroup.procs").write_text(str(pid))
        _delegate(folder)


def joining(folders: list[Path], command: list[str]) -> list[str]:
    """The command, wrapped so that it joins the groups before it becomes the program."""
    files = [str(folder / "cgroup.procs") for folder in folders]
    script = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done; shift; exec "$@"'
    return ["sh", "-c", script, "sh", *files, "--", *command]


def find_all(cluster_id: str) -> list[Path]:
    """The cluster's groups that exist, wherever they hang; deepest first."""
    found: list[Path] = []
    for folder, names, _ in os.walk(ROOT):
        if f"{PREFIX}{cluster_id}" in names:
            top = Path(folder) / f"{PREFIX}{cluster_id}"
            found += [Path(inner) for inner, _, _ in os.walk(top, topdown=False)]
            names.remove(top.name)
    return found


def remove_all(cluster_id: str, deadline_s: float = 30.0) -> list[Path]:
    """Ends what still runs in the cluster's groups and removes them; returns what is left."""
    deadline = time.monotonic() + deadline_s
    while left := find_all(cluster_id):
        for folder in left:
            for pid in _members(folder):
                start = start_time(pid)
                if start is not None:
                    kill(ProcessRecord("member", pid, start))
            with contextlib.suppress(OSError):
                folder.rmdir()
        if time.monotonic() > deadline:
            return find_all(cluster_id)
        time.sleep(0.02)
    return []


def _members(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split() if line != "0"]
    except OSError:
        return []
