"""What demo and suite share, without a cluster: which cluster is meant, commands, and the processes of pods."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.kit import cluster
from e2e.kit.processes import seen
from e2e.kit.shell import CommandFailed, run, wait_for


def test_the_embedded_kubeconfig_is_no_foreign_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # As a person does who follows what `make demo` prints, and then runs `make clean-demo`.
    monkeypatch.setenv("PDCLUSTER_STATE", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    assert cluster.given() is None
    monkeypatch.delenv("KUBECONFIG")
    assert cluster.given() is None


def test_a_foreign_cluster_is_driven_with_the_kubectl_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "/somewhere/config")
    found = cluster.given()
    assert found is not None
    assert (found.binary, found.kubeconfig) == (str(program), "/somewhere/config")


def test_a_foreign_cluster_without_an_image_is_refused_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/sh\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "/somewhere/config")
    monkeypatch.delenv("PDCLUSTER_IMAGE", raising=False)
    with pytest.raises(CommandFailed, match="set PDCLUSTER_IMAGE"):
        cluster.up()


@pytest.mark.parametrize("show", [False, True])
def test_a_failed_command_says_its_exit_status(show: bool) -> None:
    with pytest.raises(CommandFailed, match="exit 3"):
        run([sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"], show=show)


def test_progress_that_is_shown_is_not_swallowed(capfd: pytest.CaptureFixture[str]) -> None:
    done = run([sys.executable, "-c", "import sys; print('answer'); print('progress', file=sys.stderr)"], show=True)
    assert done.stdout == "answer\n"
    assert capfd.readouterr().err == "progress\n"


def test_a_process_is_found_by_its_environment() -> None:
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, "POD_NAME": "pod-of-this-test"})
    try:
        # Its command line may be empty for a moment after exec.
        found = wait_for(
            "the child",
            lambda: [p for p in seen() if "POD_NAME=pod-of-this-test" in p.environment and "sleep" in p.command],
            timeout=60,
        )
        assert [(process.pid, process.command.split()) for process in found] == [(child.pid, ["sleep", "600"])]
    finally:
        child.kill()
        child.wait(60)
