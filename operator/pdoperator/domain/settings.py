"""Knobs of decide(): images, limits and deadlines. The process's settings fill it; the defaults are what tests use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecideSettings:
    """All times are seconds."""

    transfer_image: str = "pdcluster/transfer:latest"
    """Image of the sidecar and of SGLang's plugin, unless the spec names one."""
    router_image: str = "lightseekorg/smg:v1.13.0"
    operator_namespace: str = "pdcluster-system"
    image_pull_policy: str = "IfNotPresent"
    converging_requeue: float = 0.5
    idle_requeue: float = 1.5
    """Only sidecars and routers can tell some changes (a peer that can not be reached any more), and a pod
    that is not wired must be off the routers within 2 s."""
    unreachable_tries: int = 3
    """Distinct findings of Unreachable between two wired pods before a gate may fall."""
    unreachable_seconds: float = 5.0
    """... or this long, when the finding is not repeated."""
    rejoin_stability_seconds: float = 5.0
    """A pod that fell out through its own links stays out this long after they are good again."""
    stale_limit_seconds: float = 60.0
    failed_limit_seconds: float = 10.0
    """How long a rank says that it failed before its pod is replaced: an engine that ends by itself has the time to."""
    drain_limit_seconds: float = 30.0
    """How long a leaving pod waits for routers to drop it before it is deleted anyway."""
    backoff_base_seconds: float = 10.0
    backoff_max_seconds: float = 300.0
    backoff_reset_seconds: float = 300.0
    """A pod that was ready this long clears its slot's failures."""
    certificate_renew_before_seconds: float = 10 * 86400.0
    certificate_rewrite_seconds: float = 120.0
    """Pause between two rewrites of the pods' certificate when a pod shows one that is not the operator's."""
    probe_deadline_seconds: float = 30.0
    """For one real request through a pair that a backend of SGLang's own connects."""
    probe_failures: int = 2
    """Real requests that fail in a row before KVTransferVerified says so."""
    probe_retry_seconds: float = 5.0
    """Pause after a real request that was not served; doubles up to verification.intervalSeconds."""
    recycle_failures: int = 4
    """Real requests through a prefill rank that fail in a row before its pod may be replaced ..."""
    recycle_seconds: float = 60.0
    """... over at least this long; also the pause between two such replacements in one PDCluster."""
    probes_at_once: int = 16
    """Real requests under way in one PDCluster."""
    network_policy: bool = True
    disruption_budgets: bool = True
