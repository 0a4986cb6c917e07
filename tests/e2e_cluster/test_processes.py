"""Processes of the embedded cluster: a recycled pid is never signalled."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import cgroups, processes
from e2e.cluster.paths import Layout
from e2e.cluster.processes import Processes, ProcessRecord
from e2e.kit.shell import wait_for


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_start_time_of_a_name_with_parentheses() -> None:
    fields = ["S", *[str(number) for number in range(4, 22)], "777", "23"]
    assert processes.parse_start_time(f"12 (a ) (b) {' '.join(fields)}") == 777


def test_a_zombie_is_not_alive() -> None:
    fields = ["Z", *[str(number) for number in range(4, 22)], "777", "23"]
    assert processes.parse_start_time(f"12 (sleep) {' '.join(fields)}") is None


def test_another_process_with_the_pid_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    start = processes.start_time(sleeper.pid)
    assert start is not None
    recycled = ProcessRecord("etcd", sleeper.pid, start - 1)
    assert not recycled.alive()
    processes.kill(recycled)
    assert sleeper.poll() is None
    processes.kill(ProcessRecord("etcd", sleeper.pid, start))
    assert sleeper.wait(timeout=60) == -9


def test_kill_all_ends_what_a_process_left_behind(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    cluster = Processes(layout)
    # The child outlives its parent and is in no record: only the marker tells whose it is.
    cluster.start("parent", ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/child; sleep 600"])
    child_file = tmp_path / "child"
    while not child_file.exists() or not child_file.read_text().endswith("\n"):
        assert cluster.alive("parent")
        time.sleep(0.01)
    child = int(child_file.read_text())
    os.kill(cluster.pid("parent"), 9)
    # Its environment may not be readable for a moment, while it becomes `sleep`.
    wait_for("the child is marked", lambda: child in processes.marked(layout), timeout=60)
    assert cluster.kill_all(deadline_s=60) == []
    assert processes.start_time(child) is None


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.processes.mkdir()
    (layout.processes / "etcd.json").write_text('{"name": "etcd"')
    assert Processes(layout).record("etcd") is None
    assert Processes(layout).records() == []


def test_own_control_groups() -> None:
    text = "9:name=systemd:/a\n4:memory:/b/c\n2:cpu,cpuacct:/\n0::/d\n"
    assert cgroups.parse_own_groups(text) == {
        "name=systemd": "/a",
        "memory": "/b/c",
        "cpu": "/",
        "cpuacct": "/",
        "": "/d",
    }
