"""Where the embedded cluster keeps its files.

Three roots, all outside the source tree: the cache (programs that are built
once and kept), the state (everything of one running cluster; `down` removes
it) and the source tree itself, which is only read.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEFAULT_STATE = "/var/tmp/pdcluster-cluster"

# A unix socket's path may have 107 characters; the longest below the state is
# node-N/containerd.sock.ttrpc.
_MAX_STATE_LENGTH = 70


def cache_dir() -> Path:
    configured = os.environ.get("PDCLUSTER_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "pdcluster"


@dataclass(frozen=True)
class Layout:
    """The files of one cluster."""

    root: Path

    @classmethod
    def default(cls) -> Layout:
        return cls(Path(os.environ.get("PDCLUSTER_STATE") or DEFAULT_STATE))

    def check(self) -> None:
        """Refuses a folder in which a cluster couldn't run."""
        if not self.root.is_absolute() or len(str(self.root)) > _MAX_STATE_LENGTH:
            raise ValueError(
                f"the state folder must be an absolute path of at most {_MAX_STATE_LENGTH} "
                f"characters (unix sockets live below it): {self.root}"
            )

    @property
    def cluster_id(self) -> str:
        """Names what lies outside the state folder (control groups), so that it's found again."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    @property
    def lock(self) -> Path:
        return self.root.with_name(self.root.name + ".lock")

    @property
    def pod_environment(self) -> Path:
        """The Python environment that pods of the project's image see (pod_env.py)."""
        return self.root / "pod-env"

    @property
    def engine_environment(self) -> Path:
        """The same for pods of an engine's image."""
        return self.root / "engine-env"

    @property
    def cluster_file(self) -> Path:
        return self.root / "cluster.json"

    @property
    def started(self) -> Path:
        """Exists once a start has come to its end."""
        return self.root / "started"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def processes(self) -> Path:
        return self.root / "processes"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def control_plane(self) -> Path:
        return self.root / "control-plane"

    @property
    def resolv_conf(self) -> Path:
        return self.root / "resolv.conf"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def node(self, name: str) -> Path:
        return self.root / name

    def component_kubeconfig(self, component: str) -> Path:
        return self.control_plane / f"{component}.kubeconfig"
