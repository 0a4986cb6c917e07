"""A node's containerd: its settings, its pod network, and the images it holds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .addressing import NodeAddresses
from .errors import ClusterError
from .kube import Object

NAMESPACE = "k8s.io"  # where the CRI plugin looks for images
PAUSE_IMAGE = "pdcluster.local/pause:1"
HOST_MOUNT = "/host"

_CONFIG = """version = 2
root = "{state}/containerd"
state = "/run/containerd"
oom_score = 0
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.internal.v1.opt",
]
[grpc]
  address = "{state}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  enable_selinux = false
  restrict_oom_score_adj = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  netns_mounts_under_state_dir = true
  enable_unprivileged_ports = true
  enable_unprivileged_icmp = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{state}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{state}/runtime-spec.json"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def socket(state: Path) -> Path:
    return state / "containerd.sock"


def configure(state: Path, node: NodeAddresses) -> Path:
    """Writes the settings of a node's containerd and returns the main file."""
    (state / "cni").mkdir(parents=True, exist_ok=True)
    (state / "cni" / "10-pods.conflist").write_text(json.dumps(_network(state, node), indent=1))
    (state / "runtime-spec.json").write_text(json.dumps(_runtime_spec(state)))
    config = state / "containerd.toml"
    config.write_text(_CONFIG.format(state=state, pause=PAUSE_IMAGE, snapshotter=_snapshotter(state)))
    return config


def _network(state: Path, node: NodeAddresses) -> Object:
    # Point to point and not a bridge: every packet passes the node's own routing, so that
    # a Service whose pod is on the same node works without bridge netfilter.
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "ptp",
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "dataDir": f"{state}/ipam",
                    "ranges": [[{"subnet": str(node.pods)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _runtime_spec(state: Path) -> Object:
    """containerd's default runtime specification, and the host's shared folders below /host."""
    made = subprocess.run(["ctr", "oci", "spec"], check=True, capture_output=True, text=True, timeout=20)
    spec: Object = json.loads(made.stdout)
    spec["mounts"].append(
        {
            "destination": HOST_MOUNT,
            "type": "bind",
            "source": f"{state}/host",
            "options": ["rbind", "rslave", "ro"],
        }
    )
    return spec


def _snapshotter(state: Path) -> str:
    found = subprocess.run(
        ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(state)],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    # An overlay can't be the upper layer of another: copy the layers there.
    return "native" if found.stdout.strip() == "overlay" else "overlayfs"


def ctr(state: Path, *arguments: str, timeout: float = 300) -> str:
    """Runs containerd's own client against a node and returns what it printed."""
    command = ["ctr", "--address", str(socket(state)), "--namespace", NAMESPACE, *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout)
    except subprocess.CalledProcessError as error:
        raise ClusterError(
            f"`ctr {' '.join(arguments)}` on {state.name} failed: {error.stderr.strip()}",
            log=state.parent / "logs" / f"{state.name}.log",
        ) from error
    return done.stdout


def answers(state: Path) -> bool:
    if not socket(state).exists():
        return False
    try:
        ctr(state, "version", timeout=20)
    except (ClusterError, subprocess.TimeoutExpired):
        return False
    return True


def images(state: Path) -> dict[str, str]:
    """The images that a node holds, with the digests of their manifests."""
    rows = [line.split() for line in ctr(state, "images", "list").splitlines()[1:]]
    return {row[0]: row[2] for row in rows if len(row) > 2}


def import_image(state: Path, archive: Path, name: str = "") -> list[str]:
    """Imports an OCI or Docker archive; with a name, the image is known by it too."""
    printed = ctr(state, "images", "import", str(archive))
    # Each line reads "unpacking NAME (DIGEST)...done".
    found = [line.split()[1] for line in printed.splitlines() if line.startswith("unpacking ")]
    if name and name not in found:
        if len(found) != 1:
            raise ClusterError(f"{archive} holds {len(found)} images, not one to call {name}")
        ctr(state, "images", "tag", "--force", found[0], name)
        found = [name]
    return found
