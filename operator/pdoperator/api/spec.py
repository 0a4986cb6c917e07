"""spec of a PDCluster v1alpha1."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from pdoperator.api.base import ApiModel
from pdtransfer.contract.base import Backend, EngineType
from pdtransfer.contract.facts import HostKVMode


class GeometrySpec(ApiModel):
    """Shape of the model's KV, so that fit can be decided before any pod exists."""

    attention: str = "GQA"
    layers: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    v_head_dim: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    index_head_dim: int | None = None
    sliding_window_layers: tuple[int, ...] = ()
    linear_layers: tuple[int, ...] = ()
    dtype: str | None = None


class ModelSpec(ApiModel):
    """What to serve. `source` is a path in the engine container or a hub id; `volume` any pod volume source,
    mounted read-only at /mnt/models (then `source` may be left out)."""

    source: str | None = None
    revision: str | None = None
    served_name: str | None = None
    volume: dict[str, Any] | None = None
    geometry: GeometrySpec | None = None


class EngineSpec(ApiModel):
    type: EngineType = EngineType.SGLANG
    image: str
    version: str | None = None


class KVCacheSpec(ApiModel):
    page_size: int | None = None
    dtype: str | None = None


class FabricType(StrEnum):
    RDMA = "RDMA"
    TCP = "TCP"


class GPUDirect(StrEnum):
    REQUIRED = "Required"
    PREFERRED = "Preferred"
    OFF = "Off"


class FabricResource(ApiModel):
    name: str
    count: int = 1


class FabricSpec(ApiModel):
    type: FabricType = FabricType.RDMA
    resources: tuple[FabricResource, ...] = ()
    resource_claim_template: str | None = None
    """One claim per rank is made from this ResourceClaimTemplate (ecosystem.md 2)."""
    devices: tuple[str, ...] = ()
    networks: str | None = None
    annotations: dict[str, str] = {}
    host_network: bool = False
    privileged: bool = False
    gpu_direct: GPUDirect = GPUDirect.PREFERRED


class PluginSpec(ApiModel):
    name: str = "UCX"
    parameters: dict[str, str] = {}


class VerificationSpec(ApiModel):
    min_bandwidth: str | None = None
    """Quantity in bytes per second, for example 10G."""
    interval_seconds: int = 60


class TimeoutsSpec(ApiModel):
    waiting_seconds: int = 30
    transfer_seconds: int = 60
    drain_seconds: int = 30


class TransferSpec(ApiModel):
    backend: Backend = Backend.PDCLUSTER
    image: str | None = None
    plugin: PluginSpec = PluginSpec()
    fabric: FabricSpec = FabricSpec()
    verification: VerificationSpec = VerificationSpec()
    timeouts: TimeoutsSpec = TimeoutsSpec()


class HierarchicalCacheSpec(ApiModel):
    ratio: float | None = None
    size: int | None = None
    write_policy: str | None = None
    layout: str | None = None
    io_backend: str | None = None
    storage_backend: str | None = None


class EnvVar(ApiModel):
    name: str
    value: str | None = None
    value_from: dict[str, Any] | None = None


class PodTemplate(ApiModel):
    """The narrow set of pod overrides; merged by key over what the operator sets (its own keys win)."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] | None = None
    topology_spread_constraints: tuple[dict[str, Any], ...] = ()
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    service_account_name: str | None = None
    runtime_class_name: str | None = None
    image_pull_secrets: tuple[dict[str, str], ...] = ()
    volumes: tuple[dict[str, Any], ...] = ()
    volume_mounts: tuple[dict[str, Any], ...] = ()
    security_context: dict[str, Any] | None = None
    container_security_context: dict[str, Any] | None = None
    termination_grace_period_seconds: int | None = None


class RoleSpec(ApiModel):
    replicas: int = Field(default=1, ge=0)
    nodes_per_replica: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    attention_data_parallel_size: int = Field(default=1, ge=1)
    hierarchical_cache: HierarchicalCacheSpec | None = None
    extra_args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    resources: dict[str, Any] = {}
    template: PodTemplate = PodTemplate()


class HostKVSpec(ApiModel):
    mode: HostKVMode = HostKVMode.OFF
    size: str | None = None


class DecodeSpec(RoleSpec):
    host_kv: HostKVSpec = Field(default=HostKVSpec(), alias="hostKV")


class RouterType(StrEnum):
    SMG = "SMG"
    INFERENCE_POOL = "InferencePool"
    NONE = "None"


class RouterPolicies(ApiModel):
    prefill: str | None = None
    decode: str | None = None


class RouterSpec(ApiModel):
    type: RouterType = RouterType.SMG
    replicas: int = Field(default=1, ge=0)
    policies: RouterPolicies = RouterPolicies()
    image: str | None = None
    template: PodTemplate = PodTemplate()


class Isolation(StrEnum):
    FIT = "Fit"
    REVISION = "Revision"


class RolloutSpec(ApiModel):
    max_surge: int = 0
    max_unavailable: int = 1
    isolation: Isolation = Isolation.FIT
    progress_deadline_seconds: int = 600


class PDClusterSpec(ApiModel):
    model: ModelSpec
    engine: EngineSpec
    kv_cache: KVCacheSpec = Field(default=KVCacheSpec(), alias="kvCache")
    transfer: TransferSpec = TransferSpec()
    prefill: RoleSpec = RoleSpec()
    decode: DecodeSpec = DecodeSpec()
    router: RouterSpec = RouterSpec()
    rollout: RolloutSpec = RolloutSpec()
