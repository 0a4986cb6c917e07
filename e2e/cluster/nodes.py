"""The nodes: each one set of namespaces with a containerd, a kubelet and a kube-proxy in it.

A node has its own process, mount, network, host name, IPC and control group
namespaces. Its first process is tini below `unshare --kill-child`: when that
is killed, everything of the node goes with it, containers included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from . import addressing, cgroups, containerd, fabric
from .addressing import NodeAddresses
from .kube import Object, wait_for
from .paths import Layout
from .processes import Processes, ProcessRecord, children, kill, start_time
from .tools import Tools

_UNSHARE = (
    *("unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup"),
    *("--fork", "--kill-child", "--mount-proc", "--propagation", "private"),
)
KUBE_PROXY_CONFIG = "kube-proxy.json"


def process_name(node: str) -> str:
    return node


def init_pid(processes: Processes, node: str) -> int:
    """The host's pid of the node's first process (0 while there is none)."""
    born = children(processes.pid(process_name(node)))
    return born[0] if born else 0


def start_namespaces(
    layout: Layout,
    processes: Processes,
    node: NodeAddresses,
    every: Sequence[NodeAddresses],
) -> bool:
    """Starts the node with containerd and joins it to the fabric; False if it runs."""
    if processes.alive(process_name(node.name)):
        return False
    state = layout.node(node.name)
    for folder in (state, state / "host"):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "ready").unlink(missing_ok=True)
    containerd.configure(state, node)
    groups = cgroups.create(layout.cluster_id, node.name)
    (state / "cgroups").write_text("".join(f"{group}\n" for group in groups))
    routes = [word for other in every if other != node for word in (str(other.pods), str(other.node))]
    script = Path(__file__).with_name("node_init.sh")
    command = [*_UNSHARE, "tini", "-s", "--", "sh", str(script), node.name, str(state)]
    command += [f"{node.node}/{addressing.NODES.prefixlen}", str(addressing.FABRIC), *routes]
    found = cgroups.hierarchies()
    processes.start(
        process_name(node.name),
        cgroups.joining(groups, command),
        environment={
            "CGROUP_VERSION": str(found.version),
            "CGROUP_CONTROLLERS": " ".join(found.folders),
        },
    )
    return True


def connect(layout: Layout, processes: Processes, node: NodeAddresses) -> None:
    """Plugs the node into the fabric and waits until its containerd answers."""
    name = process_name(node.name)
    state = layout.node(node.name)

    def alive() -> bool:
        return processes.alive(name)

    log = layout.log(name)
    wait_for(
        f"{node.name}'s namespaces",
        lambda: _has_own_network(init_pid(processes, node.name)),
        timeout=60,
        log=log,
        alive=alive,
        interval=0.01,
    )
    # The other end appears in the node under the name that its start-up waits for.
    pid = str(init_pid(processes, node.name))
    port = f"veth-{node.index}"
    fabric.ip(processes, "link", "delete", port, check=False)  # of the node's previous life
    fabric.ip(
        processes,
        *("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid),
    )
    fabric.ip(processes, "link", "set", port, "master", "br0", "up")
    fabric.ip(processes, "route", "replace", str(node.pods), "via", str(node.node))
    wait_for(f"{node.name}'s start-up", (state / "ready").exists, timeout=90, log=log, alive=alive)
    wait_for(
        f"{node.name}'s containerd",
        lambda: containerd.answers(state),
        timeout=120,
        log=log,
        alive=alive,
        interval=0.05,
    )
    cgroups.settle(_groups(layout, node.name))


def _groups(layout: Layout, node: str) -> list[Path]:
    """The groups that the node was started in: a later caller may live in other ones."""
    return [Path(line) for line in (layout.node(node) / "cgroups").read_text().splitlines()]


def _has_own_network(pid: int) -> bool:
    if not pid:
        return False
    own = Path("/proc/self/ns/net").readlink()
    return Path(f"/proc/{pid}/ns/net").readlink() != own


def inside(layout: Layout, processes: Processes, node: str) -> list[str]:
    """The prefix that makes a command run as a process of the node."""
    pid = str(init_pid(processes, node))
    spaces = ["--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup"]
    groups = [cgroups.leaf(folder) for folder in _groups(layout, node)]
    return cgroups.joining(groups, ["nsenter", "--target", pid, *spaces, "--"])


def kubelet_config(layout: Layout, node: NodeAddresses) -> Object:
    state = layout.node(node.name)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(layout.pki / f"kubelet-{node.name}.crt"),
        "tlsPrivateKeyFile": str(layout.pki / f"kubelet-{node.name}.key"),
        "containerRuntimeEndpoint": f"unix://{containerd.socket(state)}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [str(addressing.DNS_SERVICE)],
        "clusterDomain": addressing.CLUSTER_DOMAIN,
        "resolvConf": "",
        "maxPods": node.max_pods,
        "podLogsDir": f"{state}/pod-logs",
        "volumePluginDir": f"{state}/volume-plugins",
        # The machine may not let a process lower its own score for the out-of-memory
        # killer, nor raise its limit of open files very far.
        "oomScoreAdj": 0,
        "maxOpenFiles": 20000,
        # Both nodes share one disk with whatever else the machine does: a full disk or a
        # busy machine must not evict a test's pods or their images.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        # Quicker than the defaults (1 m, 10 s): extended resources and volume changes show
        # up within seconds.
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "4s",
    }


def start_kubelet(layout: Layout, processes: Processes, tools: Tools, node: NodeAddresses) -> None:
    name = f"kubelet-{node.name}"
    if processes.alive(name):
        return
    state = layout.node(node.name)
    config = state / "kubelet.json"
    config.write_text(json.dumps(kubelet_config(layout, node), indent=1))
    processes.start(
        name,
        [
            *inside(layout, processes, node.name),
            tools["kubelet"],
            f"--config={config}",
            f"--kubeconfig={layout.component_kubeconfig(node.name)}",
            f"--hostname-override={node.name}",
            f"--node-ip={node.node}",
            f"--root-dir={state}/kubelet",
            f"--cert-dir={state}/kubelet-pki",
            "--v=2",
        ],
    )


def kube_proxy_config(layout: Layout, node: str) -> Object:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(layout.component_kubeconfig("kube-proxy"))},
        "hostnameOverride": node,
        "clusterCIDR": str(addressing.PODS),
        # The conntrack limits belong to the whole machine.
        "conntrack": {"maxPerCore": 0, "min": 0},
        "nftables": {"minSyncPeriod": "100ms"},
    }


def start_kube_proxies(
    layout: Layout,
    processes: Processes,
    tools: Tools,
    every: Sequence[NodeAddresses],
) -> None:
    """One on each node, and one for the fabric, so that the host's commands reach Services.

    The fabric is no node of its own: its kube-proxy goes by the first node's name, which only
    decides what it takes for a node's own addresses and for local endpoints.
    """
    places = [(node.name, node.name) for node in every] + [(fabric.PROCESS, every[0].name)]
    for place, node in places:
        name = f"kube-proxy-{place}"
        if processes.alive(name):
            continue  # and its file stays as it is: kube-proxy ends when that is written anew
        folder = layout.control_plane if place == fabric.PROCESS else layout.node(place)
        config = folder / KUBE_PROXY_CONFIG
        config.write_text(json.dumps(kube_proxy_config(layout, node), indent=1))
        prefix = fabric.inside(processes) if place == fabric.PROCESS else inside(layout, processes, place)
        processes.start(name, [*prefix, tools["kube-proxy"], f"--config={config}", "--v=2"])


def program_pid(pid: int) -> int:
    """The program behind a recorded pid: nsenter and unshare stay as its only parent."""
    while Path(f"/proc/{pid}/comm").read_text().strip() in {"nsenter", "unshare"}:
        born = children(pid)
        if not born:
            break
        pid = born[0]
    return pid


def kill_program(processes: Processes, name: str) -> None:
    """Kills the program, not just the nsenter or unshare that waits for it."""
    recorded = processes.pid(name)
    pid = program_pid(recorded)
    start = start_time(pid)
    if start is not None:
        kill(ProcessRecord(name, pid, start))
    wait_for(f"the end of {name}", lambda: not processes.alive(name), timeout=60, interval=0.02)
