"""Every (API group, resource, verbs) the operator uses, for the chart's ClusterRole and its test.

Secrets of user namespaces are written only (create, patch): whoever takes over the operator's
token can not read what users keep there. Reading is allowed in the operator's own namespace alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdoperator.api import names


@dataclass(frozen=True)
class Rule:
    """One RBAC rule's worth. `optional`: the operator works without it and says what it can not know."""

    group: str
    resource: str
    verbs: frozenset[str]
    optional: bool = False


def _rule(group: str, resource: str, verbs: str, optional: bool = False) -> Rule:
    return Rule(group, resource, frozenset(verbs.split()), optional)


CLUSTER_RULES: tuple[Rule, ...] = (
    _rule(names.GROUP, names.PLURAL, "get list watch"),
    _rule(names.GROUP, f"{names.PLURAL}/status", "patch"),
    _rule("", "pods", "get list watch create delete"),
    _rule("", "pods/status", "patch"),
    _rule("", "services", "get list create patch delete"),
    _rule("", "secrets", "create patch"),
    _rule("", "events", "create patch"),
    # Why a pod starts no container (a volume that is not there) stands only in its events.
    _rule("", "events", "list", optional=True),
    _rule("", "nodes", "list", optional=True),
    _rule("apps", "deployments", "get list create patch delete"),
    _rule("apps", "controllerrevisions", "get list create patch delete"),
    _rule("policy", "poddisruptionbudgets", "get list create patch delete"),
    _rule("networking.k8s.io", "networkpolicies", "get list create patch delete"),
)
"""In every watched namespace (a ClusterRole, or a Role in each of WATCH_NAMESPACES)."""

OWN_NAMESPACE_RULES: tuple[Rule, ...] = (
    _rule("", "secrets", "get create patch"),
    _rule("coordination.k8s.io", "leases", "get create update"),
)
"""Only in the operator's own namespace: its CA and its Lease."""
