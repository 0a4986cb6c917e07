"""Checks what the host must offer, and installs Debian packages that are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .errors import ClusterError

LIST = Path(__file__).with_name("debian.txt")
_APT_TIMEOUT_S = 600


def packages() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in LIST.read_text().splitlines())
    return [line for line in lines if line]


def check_host() -> None:
    if sys.platform != "linux":
        raise ClusterError(
            "the embedded cluster needs Linux",
            hint="set KUBECONFIG to a cluster of your own instead",
        )
    if os.geteuid() != 0:
        raise ClusterError(
            "the embedded cluster needs root: it makes namespaces, mounts and control groups",
            hint="run it as root (sudo), or set KUBECONFIG to a cluster of your own instead",
        )


def missing() -> list[str]:
    if shutil.which("dpkg-query") is None:
        programs = ("containerd", "ctr", "runc", "tini", "nft", "ip", "unshare", "nsenter")
        absent = [name for name in programs if shutil.which(name) is None]
        if absent:
            raise ClusterError(
                f"not a Debian system, and these programs are missing: {', '.join(absent)}",
                hint=f"install what {LIST} names with the system's own package manager",
            )
        return []
    asked = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev} ${Package}\n", *packages()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    installed = {line.split()[1] for line in asked.stdout.splitlines() if line.startswith("ii")}
    return [name for name in packages() if name not in installed]


def ensure_packages(say: Callable[[str], None]) -> None:
    wanted = missing()
    if not wanted:
        return
    say(f"installing Debian packages: {' '.join(wanted)}")
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *wanted]):
        done = subprocess.run(
            ["apt-get", "-q", *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=_APT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            output = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise ClusterError(
                f"`apt-get {' '.join(arguments)}` failed:\n{output}",
                hint=f"install the packages of {LIST} by hand",
            )
