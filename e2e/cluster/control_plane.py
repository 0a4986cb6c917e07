"""etcd, the API server, the controller manager and the scheduler, inside the fabric."""

from __future__ import annotations

from . import addressing, fabric
from .kube import KubeClient, wait_for
from .paths import Layout
from .processes import Processes
from .tools import Tools

ETCD = "etcd"
API_SERVER = "kube-apiserver"
CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"

# etcd listens on the fabric's loopback only, where nothing but the control plane is.
_ETCD_URL = "http://127.0.0.1:2379"
_START_TIMEOUT_S = 180.0


def start(layout: Layout, processes: Processes, tools: Tools) -> None:
    prefix = fabric.inside(processes)
    processes.ensure(
        ETCD,
        [
            *prefix,
            tools["etcd"],
            f"--data-dir={layout.control_plane}/etcd",
            f"--listen-client-urls={_ETCD_URL}",
            f"--advertise-client-urls={_ETCD_URL}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            # A test cluster's data need not outlive a power cut.
            "--unsafe-no-fsync",
            "--logger=zap",
        ],
    )
    pki = layout.pki
    processes.ensure(
        API_SERVER,
        [
            *prefix,
            tools["kube-apiserver"],
            f"--etcd-servers={_ETCD_URL}",
            f"--secure-port={addressing.API_SERVER_PORT}",
            f"--advertise-address={addressing.FABRIC}",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
            f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            f"--token-auth-file={layout.control_plane}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--service-cluster-ip-range={addressing.SERVICES}",
            f"--service-account-issuer=https://kubernetes.default.svc.{addressing.CLUSTER_DOMAIN}",
            f"--service-account-key-file={pki}/service-accounts.pub",
            f"--service-account-signing-key-file={pki}/service-accounts.key",
            # Webhooks are called at their pods' addresses, not through kube-proxy.
            "--enable-aggregator-routing=true",
            "--profiling=false",
        ],
    )
    wait_for(
        "the API server",
        KubeClient(layout.kubeconfig).ready,
        timeout=_START_TIMEOUT_S,
        log=layout.log(API_SERVER),
        hint=f"see also {layout.log(ETCD)}; then `python3 -m e2e.cluster down` and up again",
        alive=lambda: processes.alive(API_SERVER) and processes.alive(ETCD),
    )
    processes.ensure(
        CONTROLLER_MANAGER,
        [
            *prefix,
            tools["kube-controller-manager"],
            f"--kubeconfig={layout.component_kubeconfig(CONTROLLER_MANAGER)}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={pki}/service-accounts.key",
            f"--root-ca-file={pki}/ca.crt",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            # There is no cloud, and the nodes' pod ranges are fixed.
            "--controllers=*,-node-ipam-controller,-node-route-controller,"
            "-service-lb-controller,-cloud-node-lifecycle-controller",
        ],
    )
    processes.ensure(
        SCHEDULER,
        [
            *prefix,
            tools["kube-scheduler"],
            f"--kubeconfig={layout.component_kubeconfig(SCHEDULER)}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        ],
    )
