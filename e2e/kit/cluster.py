"""Which cluster to work on: the one KUBECONFIG names, or the embedded one, brought up when needed."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import ROOT, CommandFailed, run

EMBEDDED_IMAGE = "pdcluster.local/pdcluster:dev"
BUILD_TIMEOUT = 3600.0
"""Seconds for building Kubernetes from nothing on two busy cores."""


@dataclass(frozen=True)
class Target:
    """A cluster, the tools to drive it, and the image its pods run."""

    kubectl: Kubectl
    helm: str
    image: str
    embedded: bool


def cluster_command(*args: str, timeout: float = 300) -> str:
    """One call of `python3 -m e2e.cluster`."""
    return run([sys.executable, "-m", "e2e.cluster", *args], timeout=timeout).stdout.strip()


def _tool(name: str) -> str:
    try:
        return cluster_command("tool", name)
    except CommandFailed:
        found = shutil.which(name)
        if not found:
            raise CommandFailed(f"{name} is not there: run `make tools`, or install it") from None
        return found


def up() -> Target:
    """The cluster, ready to be used; builds and starts the embedded one unless KUBECONFIG is set."""
    given = os.environ.get("KUBECONFIG")
    if given:
        image = os.environ.get("PDCLUSTER_IMAGE", "")
        if not image:
            raise CommandFailed(
                "KUBECONFIG is set, so your own cluster is used: set PDCLUSTER_IMAGE to an image of this "
                "project that its nodes can pull, or unset KUBECONFIG to use the embedded cluster"
            )
        return Target(Kubectl(_tool("kubectl"), given), _tool("helm"), image, embedded=False)
    cluster_command("build-tools", timeout=BUILD_TIMEOUT)
    cluster_command("up", timeout=600)
    load_images()
    kubeconfig = cluster_command("kubeconfig")
    return Target(Kubectl(_tool("kubectl"), kubeconfig), _tool("helm"), EMBEDDED_IMAGE, embedded=True)


def load_images() -> None:
    """Put the project's images on every embedded node; this checkout and its environment are mounted in."""
    cluster_command(
        "images", "--venv", str(ROOT / ".venv"), "--source", str(ROOT), "--mount", str(layer()), timeout=300
    )


def layer() -> Path:
    """Folder of the third-party packages that .venv builds on (hack/setup.sh)."""
    return Path((ROOT / ".venv" / ".layer").read_text().strip())
