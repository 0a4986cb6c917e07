"""maxSurge and maxUnavailable as counts."""

from __future__ import annotations

from pdoperator.api.quantities import scaled
from pdoperator.api.spec import PDClusterSpec


def max_surge(spec: PDClusterSpec, replicas: int) -> int:
    """Pods that may exist beyond `replicas`; a percentage rounds up."""
    return scaled(spec.rollout.max_surge, replicas, round_up=True)


def max_unavailable(spec: PDClusterSpec, replicas: int) -> int:
    """Pods that may be missing of `replicas`; a percentage rounds down, but as with Deployments not to
    0 where there is no surge either (nothing could ever move)."""
    count = scaled(spec.rollout.max_unavailable, replicas, round_up=False)
    if count == 0 and str(spec.rollout.max_unavailable) not in ("0", "0%") and max_surge(spec, replicas) == 0:
        return 1
    return count
