"""Every name the operator writes into a cluster: labels, annotations, ports, object names. One place."""

from __future__ import annotations

# Names in certificates are the contract's: ranks check them too.
from pdtransfer.contract.identity import OPERATOR_IDENTITY as OPERATOR_IDENTITY
from pdtransfer.contract.identity import pod_server_name as pod_server_name

GROUP = "pdcluster.io"
VERSION = "v1alpha1"
KIND = "PDCluster"
PLURAL = "pdclusters"
FIELD_MANAGER = "pdcluster-operator"

# Labels on pods and other children (all children carry LABEL_CLUSTER and LABEL_CLUSTER_UID).
LABEL_CLUSTER = "pdcluster.io/cluster"
LABEL_CLUSTER_UID = "pdcluster.io/cluster-uid"
LABEL_ROLE = "pdcluster.io/role"  # prefill | decode | ROLE_ROUTER
LABEL_REPLICA = "pdcluster.io/replica"  # replica ordinal
LABEL_REVISION = "pdcluster.io/revision"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "pdcluster-operator"
ROLE_ROUTER = "router"
ANNOTATION_ATTEMPT = "pdcluster.io/attempt"  # of engine pods: how often the slot was filled before
ANNOTATION_APPLIED_HASH = "pdcluster.io/applied-hash"  # of children: hash of the manifest that was applied
# What EPPs and dashboards of the field select by.
LABEL_LLMD_ROLE = "llm-d.ai/role"
LABEL_LLMD_ENGINE = "llm-d.ai/engine-type"

GATE_KV_WIRED = "pdcluster.io/kv-wired"

# Container and volume names in engine pods.
CONTAINER_ENGINE = "engine"
CONTAINER_SIDECAR = "pdtransfer"
CONTAINER_INSTALLER = "pdtransfer-plugin"
CONTAINER_ROUTER = "router"
VOLUME_MODEL = "model"
VOLUME_SOCKET = "pdtransfer-socket"
VOLUME_TLS = "pdtransfer-tls"
VOLUME_PLUGIN = "pdtransfer-plugin"
VOLUME_SHM = "dshm"
MODEL_PATH = "/mnt/models"
SOCKET_DIR = "/run/pdtransfer"
SOCKET_PATH = "/run/pdtransfer/sidecar.sock"
TLS_DIR = "/etc/pdtransfer/tls"
PLUGIN_VOLUME_DIR = "/opt/pdtransfer"

# Ports.
PORT_ENGINE_HTTP = 30000
PORT_BOOTSTRAP = 8998
PORT_DIST_INIT = 20000  # of an instance's first pod; SGLang takes some ports above it as well
PORT_SIDECAR_CONTROL = 9440
PORT_SIDECAR_HEALTH = 9441
PORT_ROUTER_HTTP = 30000
PORT_ROUTER_METRICS = 29000


def router_name(cluster: str) -> str:
    """Name of the router Deployment and Service."""
    return f"{cluster}-router"


def headless_service_name(cluster: str) -> str:
    """Name of the headless Service over all engine pods (stable DNS names for groups)."""
    return f"{cluster}-pods"


def tls_secret_name(cluster: str) -> str:
    """Secret with the pods' certificate: ca.crt, tls.crt, tls.key."""
    return f"{cluster}-pdtransfer-tls"


def router_key_secret_name(cluster: str) -> str:
    """Secret with the router's worker-API key under `key`."""
    return f"{cluster}-router-key"
