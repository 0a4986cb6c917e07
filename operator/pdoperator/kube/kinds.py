"""Where each kind the operator touches lives in the API: group, resource name, namespaced or not.

One table for the client's URLs, the fake's store and the RBAC table (kube.verbs)."""

from __future__ import annotations

from dataclasses import dataclass

from pdoperator.api import names

PDCLUSTER_API = f"{names.GROUP}/{names.VERSION}"


@dataclass(frozen=True)
class Kind:
    """One kind: `resource` is its plural in URLs and RBAC rules."""

    api_version: str
    kind: str
    resource: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """API group as RBAC spells it ('' for core)."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """URL path of the collection, the object or its subresource."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        parts = [root]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [self.resource] + [p for p in (name, subresource) if p]
        return "/".join(parts)


_KINDS = (
    Kind("v1", "Pod", "pods"),
    Kind("v1", "Service", "services"),
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("v1", "Secret", "secrets"),
    Kind("v1", "Event", "events"),
    Kind("v1", "Node", "nodes", namespaced=False),
    Kind("apps/v1", "Deployment", "deployments"),
    Kind("apps/v1", "ControllerRevision", "controllerrevisions"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("coordination.k8s.io/v1", "Lease", "leases"),
    Kind(PDCLUSTER_API, names.KIND, names.PLURAL),
)
KINDS = {(k.api_version, k.kind): k for k in _KINDS}


def kind_of(api_version: str, kind: str) -> Kind:
    """The table's row. KeyError names a kind that was never declared (and so has no RBAC rule)."""
    try:
        return KINDS[(api_version, kind)]
    except KeyError:
        raise KeyError(f"{api_version} {kind} is not in pdoperator.kube.kinds") from None
