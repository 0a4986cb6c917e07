"""Names in certificates: who a client of the sidecar is, and whom a rank expects to meet."""

from __future__ import annotations

OPERATOR_IDENTITY = "operator.pdcluster.internal"
"""The only name that may use a sidecar's control API."""


def pod_server_name(cluster_uid: str) -> str:
    """DNS name in the certificate that all pods of one PDCluster share (the SNI its ranks and the operator
    ask for, whatever address they dial)."""
    return f"{cluster_uid}.pod.pdcluster.internal"
