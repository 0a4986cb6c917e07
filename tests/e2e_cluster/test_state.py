"""The embedded cluster's files: state, lock, tools' keys, errors."""

import shutil
from pathlib import Path

import pytest

from e2e.cluster import debian, state, tools
from e2e.cluster.errors import ClusterError
from e2e.cluster.paths import Layout
from e2e.cluster.state import Settings


def test_settings_come_back(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert state.load(layout) is None
    Settings(nodes=2, port=6443, tools="abc").save(layout)
    assert state.load(layout) == Settings(nodes=2, port=6443, tools="abc")
    layout.cluster_file.write_text('{"nodes": 2')
    assert state.load(layout) is None


def test_the_lock_excludes_others_and_survives_its_files_removal(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "state")
    with state.locked(layout), pytest.raises(ClusterError, match="held"), state.locked(layout, timeout=0.2):
        pass
    with state.locked(layout):
        layout.lock.unlink()  # as `down` does
    with state.locked(layout):
        assert layout.lock.exists()


@pytest.mark.parametrize("path", ["relative", "/var/tmp/" + "x" * 80])
def test_a_state_folder_that_cannot_work_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="absolute path of at most"):
        Layout(Path(path)).check()


def test_clusters_have_names_of_their_own() -> None:
    assert Layout(Path("/var/tmp/a")).cluster_id != Layout(Path("/var/tmp/b")).cluster_id


def test_pinned_versions() -> None:
    assert tools.module("kubernetes").version() == "v1.34.4"
    assert tools.module("etcd").version() == "v3.7.3"
    assert "k8s.io/component-base/version.gitVersion=v1.34.4" in tools.module("kubernetes").ldflags()
    assert "chartutil.k8sVersionMinor=34" in tools.module("helm").ldflags()


def test_a_tools_key_covers_its_files_and_the_go_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tools.TOOLS_SOURCE / "pause", tmp_path / "pause")
    monkeypatch.setattr(tools, "TOOLS_SOURCE", tmp_path)
    pause = tools.module("pause")
    key = pause.key("go1.26.0")
    assert pause.key("go1.26.0") == key
    assert pause.key("go1.26.1") != key
    (tmp_path / "pause" / "main.go").write_text("package main\n")
    assert pause.key("go1.26.0") != key


def test_an_unknown_tool_is_an_error() -> None:
    with pytest.raises(ClusterError, match="no program is called kubectll"):
        tools.ensure_tools(print, ["kubectll"])


def test_the_package_list_has_no_comments() -> None:
    assert "containerd" in debian.packages()
    assert all(name and " " not in name and "#" not in name for name in debian.packages())


def test_an_error_shows_the_logs_end_and_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "etcd.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    text = ClusterError("etcd ended", hint="run down", log=log).render()
    assert "line 99" in text
    assert "line 1\n" not in text
    assert text.endswith("what to do: run down")
