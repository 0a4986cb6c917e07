"""Which cluster to work on: the one KUBECONFIG names, or the embedded one, brought up when needed."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.paths import Layout
from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import ROOT, CommandFailed, run

EMBEDDED_IMAGE = "pdcluster.local/pdcluster:dev"
BUILD_TIMEOUT = 3600.0
"""Seconds for building Kubernetes from nothing on two busy cores."""
UP_TIMEOUT = 1200.0
"""Seconds for a start; installing Debian packages on a fresh machine is part of it."""


@dataclass(frozen=True)
class Target:
    """A cluster, the tools to drive it, and the image its pods run."""

    kubectl: Kubectl
    helm: str
    image: str
    embedded: bool


def cluster_command(*args: str, timeout: float = 300, show: bool = False) -> str:
    """What one call of `python3 -m e2e.cluster` printed; `show` lets its progress through while it runs."""
    return run([sys.executable, "-m", "e2e.cluster", *args], timeout=timeout, show=show).stdout.strip()


def _tool(name: str) -> str:
    """A program for the user's own cluster: the one on PATH, else one built here."""
    return shutil.which(name) or cluster_command("tool", name, timeout=BUILD_TIMEOUT, show=True)


def given() -> Kubectl | None:
    """kubectl for the user's own cluster; None where KUBECONFIG is not set, or names the embedded one
    (as `make demo` says to set it)."""
    kubeconfig = os.environ.get("KUBECONFIG", "")
    if not kubeconfig or Path(kubeconfig) == Layout.default().kubeconfig:
        return None
    return Kubectl(_tool("kubectl"), kubeconfig)


def own_cluster(kubectl: Kubectl, image: str) -> Target:
    """The user's own cluster."""
    return Target(kubectl, _tool("helm"), image, embedded=False)


def up(engine: Path | None = None) -> Target:
    """The cluster, ready to be used; builds and starts the embedded one unless KUBECONFIG names another. `engine`:
    an engine's Python environment, whose image the embedded one gets too."""
    if own := given():
        image = os.environ.get("PDCLUSTER_IMAGE", "")
        if not image:
            raise CommandFailed(
                "KUBECONFIG is set, so your own cluster is used: set PDCLUSTER_IMAGE to an image of this "
                "project that its nodes can pull, or unset KUBECONFIG to use the embedded cluster"
            )
        return own_cluster(own, image)
    cluster_command("build-tools", timeout=BUILD_TIMEOUT, show=True)
    cluster_command("up", timeout=UP_TIMEOUT, show=True)
    load_images(engine)
    kubectl = Kubectl(cluster_command("tool", "kubectl"), cluster_command("kubeconfig"))
    return Target(kubectl, cluster_command("tool", "helm"), EMBEDDED_IMAGE, embedded=True)


def load_images(engine: Path | None = None) -> None:
    """Put the project's images on every embedded node; this checkout and its environment are mounted in."""
    more = [] if engine is None else ["--engine", str(engine)]
    cluster_command(
        *("images", "--venv", str(ROOT / ".venv"), "--source", str(ROOT), "--mount", str(layer()), *more), timeout=300
    )


def layer() -> Path:
    """Folder of the third-party packages that .venv builds on (hack/setup.sh)."""
    return Path((ROOT / ".venv" / ".layer").read_text().strip())
