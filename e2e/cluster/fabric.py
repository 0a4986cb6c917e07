"""The network that joins the nodes: one network namespace with a bridge in it.

The control plane runs inside it too. It has no way out to the host's own
network; the host comes in through the relay (for the API server) and through
`enter`, which starts a command inside it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from . import addressing, relay
from .errors import ClusterError
from .kube import wait_for
from .paths import Layout
from .processes import Processes

PROCESS = "fabric"
RELAY = "relay"

# Frames between nodes only cross the bridge: netfilter has no business with them here.
_SCRIPT = """set -e
ip link set lo up
ip link add br0 type bridge
ip addr add "$1" dev br0
ip link set br0 up
# Only so that a route exists: kube-proxy replaces the destination on the way out.
ip route add "$3" dev br0
echo 1 > /proc/sys/net/ipv4/ip_forward
for f in iptables ip6tables arptables; do
  if [ -e /proc/sys/net/bridge/bridge-nf-call-$f ]; then
    echo 0 > /proc/sys/net/bridge/bridge-nf-call-$f
  fi
done
touch "$2"
exec sleep infinity
"""


def ensure(layout: Layout, processes: Processes) -> None:
    if processes.alive(PROCESS):
        return
    ready = layout.root / "fabric.ready"
    ready.unlink(missing_ok=True)
    address = f"{addressing.FABRIC}/{addressing.NODES.prefixlen}"
    arguments = [address, str(ready), str(addressing.SERVICES)]
    processes.start(PROCESS, ["unshare", "--net", "sh", "-c", _SCRIPT, "sh", *arguments])
    wait_for(
        "the fabric's network namespace",
        ready.exists,
        timeout=60,
        log=layout.log(PROCESS),
        hint="the kernel must offer network namespaces, bridges and veth devices",
        alive=lambda: processes.alive(PROCESS),
        interval=0.01,
    )
    search = " ".join(f"{prefix}{addressing.CLUSTER_DOMAIN}" for prefix in ("default.svc.", "svc.", ""))
    layout.resolv_conf.write_text(f"nameserver {addressing.DNS_SERVICE}\nsearch {search}\noptions ndots:5\n")


def ensure_relay(layout: Layout, processes: Processes, port: int) -> None:
    """A loopback port of the host that leads to the API server."""
    if processes.alive(RELAY):
        return
    with socket.create_server(("127.0.0.1", port), backlog=256) as listener:
        target = (str(addressing.FABRIC), str(addressing.API_SERVER_PORT))
        program = [sys.executable, "-I", str(Path(relay.__file__).resolve())]
        processes.start(
            RELAY,
            [*inside(processes), *program, str(listener.fileno()), *target],
            pass_fds=[listener.fileno()],
        )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def inside(processes: Processes) -> list[str]:
    """The prefix that makes a command run in the fabric's network namespace."""
    return ["nsenter", "--target", str(processes.pid(PROCESS)), "--net", "--"]


def enter(layout: Layout, processes: Processes) -> list[str]:
    """As `inside`, and names resolve through the cluster's DNS (in a mount namespace)."""
    script = 'mount --bind "$1" /etc/resolv.conf && shift && exec "$@"'
    mounts = ["unshare", "--mount", "sh", "-c", script, "sh", str(layout.resolv_conf)]
    return [*inside(processes), *mounts]


def ip(processes: Processes, *arguments: str, check: bool = True) -> None:
    """Runs `ip` inside the fabric."""
    command = [*inside(processes), "ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if check and done.returncode:
        raise ClusterError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
