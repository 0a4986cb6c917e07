"""`up` where a cluster is up already: kept while it is what is wanted, refused with what to do where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.cluster import cluster as cluster_module
from e2e.cluster.cluster import Cluster, Health
from e2e.cluster.errors import ClusterError
from e2e.cluster.paths import Layout
from e2e.cluster.state import Settings
from e2e.cluster.tools import Tools


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster of two nodes that says it is well; whatever would start or remove one fails the test."""

    def never(*_: object) -> None:
        raise AssertionError("nothing may be started or removed")

    layout = Layout(tmp_path)
    Settings(nodes=2, port=6443, tools="pinned").save(layout)
    layout.started.touch()
    monkeypatch.setattr(Cluster, "health", lambda self, settings: Health())
    monkeypatch.setattr(Cluster, "_start", never)
    monkeypatch.setattr(cluster_module.teardown, "down", never)
    monkeypatch.setattr(cluster_module.debian, "check_host", lambda: None)
    monkeypatch.setattr(cluster_module.tools_module, "ensure_tools", lambda say, only=None: Tools(tmp_path, "pinned"))
    return Cluster(layout, lambda text: None)


def test_a_well_cluster_is_kept(running: Cluster) -> None:
    running.up(2)


def test_another_number_of_nodes_is_refused(running: Cluster) -> None:
    with pytest.raises(ClusterError, match="2 nodes, not 1") as refused:
        running.up(1)
    assert "down" in refused.value.hint


def test_programs_of_other_versions_are_refused(
    running: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster_module.tools_module, "ensure_tools", lambda say, only=None: Tools(tmp_path, "newer"))
    with pytest.raises(ClusterError, match="other versions") as refused:
        running.up(2)
    assert "down" in refused.value.hint
