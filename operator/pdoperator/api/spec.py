"""spec of a PDCluster v1alpha1. Every description here is what `kubectl explain pdc.spec...` prints."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StrictStr, StringConstraints

from pdoperator.api.base import NO_CRD_DEFAULT, ApiModel
from pdoperator.api.kubetypes import (
    INT_OR_STRING,
    QUANTITY,
    QUANTITY_PATTERN,
    AnyObject,
    EnvVarSource,
    PullSecret,
    ResourceRequirements,
    Toleration,
    Volume,
    VolumeMount,
    VolumeSource,
)
from pdtransfer.contract.base import Backend, EngineType
from pdtransfer.contract.facts import HostKVMode
from pdtransfer.contract.geometry import AttentionKind

MAX_RANKS = 1024
Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
LayerId = Annotated[StrictInt, Field(ge=0, le=4095)]
StringMap = dict[str, Annotated[str, StringConstraints(max_length=4096)]]
Quantity = Annotated[
    str,
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=64),
    Field(json_schema_extra={"x-pd-schema": QUANTITY}, coerce_numbers_to_str=True),
]
_MAP: dict[str, Any] = {"maxProperties": 64}
_NAMED: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}


class GeometrySpec(ApiModel):
    """Shape of the model's KV cache, so that fit can be decided before any pod exists. The numbers are
    those of the model's config.json."""

    attention: AttentionKind = Field(
        default=AttentionKind.GQA,
        description="How the model stores KV: GQA (also plain multi-head attention), MLA or DSA.",
    )
    layers: StrictInt = Field(ge=1, le=4096, description="Number of hidden layers.")
    kv_heads: StrictInt = Field(
        ge=1, le=4096, description="Number of key/value heads over all ranks (num_key_value_heads)."
    )
    head_dim: StrictInt = Field(ge=1, le=65536, description="Dimension of one key head.")
    v_head_dim: StrictInt | None = Field(
        default=None, ge=1, le=65536, description="Dimension of one value head where it differs from headDim."
    )
    kv_lora_rank: StrictInt | None = Field(
        default=None, ge=1, le=65536, description="Rank of the compressed KV (MLA, DSA)."
    )
    qk_rope_head_dim: StrictInt | None = Field(
        default=None, ge=1, le=65536, description="Rotary dimension stored beside the compressed KV (MLA, DSA)."
    )
    index_head_dim: StrictInt | None = Field(
        default=None, ge=1, le=65536, description="Dimension of the sparse-attention index keys (DSA)."
    )
    sliding_window_layers: tuple[LayerId, ...] = Field(
        default=(), max_length=4096, description="Ids of the layers that use sliding-window attention."
    )
    linear_layers: tuple[LayerId, ...] = Field(
        default=(), max_length=4096, description="Ids of the layers with recurrent state (Mamba, linear attention)."
    )
    dtype: ShortText | None = Field(default=None, description="The model's own dtype, for example bfloat16.")


class ModelSpec(ApiModel):
    """What to serve. Set source, volume or both."""

    source: Text | None = Field(
        default=None,
        description="Path of the model in the engine container, or an id on a model hub. May be left out when "
        "volume is set: then the model is read from /mnt/models.",
    )
    revision: ShortText | None = Field(
        default=None, description="Revision of the model on the hub (branch, tag or commit)."
    )
    served_name: ShortText | None = Field(
        default=None, description="Name under which clients ask for the model. Defaults to the source."
    )
    volume: VolumeSource | None = Field(
        default=None,
        description="Any pod volume source with exactly one key, for example {persistentVolumeClaim: {claimName: m}}, "
        "{image: {reference: r}} or {configMap: {name: m}}. Mounted read-only at /mnt/models in every engine pod.",
    )
    geometry: GeometrySpec | None = Field(
        default=None,
        description="Shape of the model's KV cache. With it the fit of prefill and decode is decided before any "
        "pod is launched; without it some rules are Unknown until the first pods report their layout.",
    )


class EngineSpec(ApiModel):
    """The inference engine that runs in prefill and decode pods."""

    type: EngineType = Field(
        default=EngineType.SGLANG,
        description="SGLang, or Reference: a small CPU engine for demos, conformance and chaos tests.",
    )
    image: Text = Field(description="Container image of the engine. SGLang images are used unmodified.")
    version: ShortText | None = Field(
        default=None,
        pattern=r"^v?[0-9]+(\.[0-9A-Za-z]+)*([-+][0-9A-Za-z.-]+)?$",
        description="Version of the engine in the image, for example 0.5.23, where the image's tag does not tell. "
        "It decides which compatibility rules apply; the running engine is asked as well.",
    )


class KVCacheSpec(ApiModel):
    """What both roles must agree on. Written explicitly to both, because their own defaults may differ."""

    page_size: StrictInt | None = Field(
        default=None, ge=1, le=4096, description="Tokens in a page of the KV pool. The same on both roles."
    )
    dtype: ShortText | None = Field(
        default=None,
        pattern="^[a-z0-9_]+$",
        description="Dtype of the KV cache, for example bfloat16 or fp8_e4m3. SGLang compares the spelling, so one "
        "spelling is given to both roles.",
    )


class FabricType(StrEnum):
    RDMA = "RDMA"
    TCP = "TCP"


class GPUDirect(StrEnum):
    REQUIRED = "Required"
    PREFERRED = "Preferred"
    OFF = "Off"


class FabricResource(ApiModel):
    """An extended resource that gives a pod access to the fabric."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern="^[^/]+/[^/]+$")] = Field(
        description="Name of the extended resource, for example rdma/hca or vpc.amazonaws.com/efa."
    )
    count: StrictInt = Field(default=1, ge=1, le=1024, description="How many of it each engine pod asks for.")


class FabricSpec(ApiModel):
    """The network that carries the KV cache from prefill to decode."""

    type: FabricType = Field(
        default=FabricType.RDMA,
        description="RDMA or TCP. With RDMA, a transfer that fell back to TCP makes the cluster not Ready; it needs "
        "resources, resourceClaimTemplate or hostNetwork.",
    )
    resources: tuple[FabricResource, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=_NAMED,
        description="Extended resources that every engine pod asks for (device plugins).",
    )
    resource_claim_template: ShortText | None = Field(
        default=None,
        description="Name of a ResourceClaimTemplate in the same namespace (dynamic resource allocation). Each pod "
        "makes one claim per rank from it, so that a claim may tie one GPU to the nearest NIC.",
    )
    devices: tuple[ShortText, ...] = Field(
        default=(),
        max_length=64,
        description="Network devices to use, for example mlx5_0. Empty: each rank picks those nearest to its GPU.",
    )
    networks: tuple[ShortText, ...] = Field(
        default=(),
        max_length=64,
        description="Secondary networks (Multus), for example roce-net or ns/net@net1; repeats are kept. Written to "
        "the annotation k8s.v1.cni.cncf.io/networks.",
    )
    annotations: StringMap = Field(
        default={}, json_schema_extra=_MAP, description="Further annotations that the fabric needs on engine pods."
    )
    host_network: StrictBool = Field(default=False, description="Run engine pods in the node's network namespace.")
    privileged: StrictBool = Field(
        default=False, description="Run the engine container privileged (some fabrics need it to register memory)."
    )
    gpu_direct: GPUDirect = Field(
        default=GPUDirect.PREFERRED,
        description="Whether the NIC must read and write GPU memory directly. Required: proven, or the cluster is "
        "not Ready. Off: never used.",
    )


class PluginSpec(ApiModel):
    """The NIXL backend under the transfer."""

    name: Annotated[str, StringConstraints(pattern="^[A-Z][A-Z0-9_]*$", max_length=64)] = Field(
        default="UCX", description="NIXL backend: UCX, or LIBFABRIC (EFA needs it)."
    )
    parameters: StringMap = Field(
        default={}, json_schema_extra=_MAP, description="Parameters of the NIXL backend, as strings."
    )


class VerificationSpec(ApiModel):
    """How the KV path is proven to work, before and during traffic."""

    min_bandwidth: Quantity | None = Field(
        default=None,
        description="Least bandwidth of a pair of pods in bytes per second, for example 10G. Judged only while the "
        "pair is idle. Unset: measured and shown, never judged.",
    )
    interval_seconds: StrictInt = Field(
        default=60,
        ge=5,
        le=86400,
        json_schema_extra=NO_CRD_DEFAULT,
        description="Seconds between two checks of a wired pair. The operator's default is 60.",
    )


class TimeoutsSpec(ApiModel):
    """Deadlines of one request's transfer. Every wait in the transfer module has one."""

    waiting_seconds: StrictInt = Field(
        default=30,
        ge=1,
        le=3600,
        json_schema_extra=NO_CRD_DEFAULT,
        description="Longest wait of one side for the other to take part in a request. The operator's default is 30.",
    )
    transfer_seconds: StrictInt = Field(
        default=60,
        ge=1,
        le=3600,
        json_schema_extra=NO_CRD_DEFAULT,
        description="Longest time from a request's first byte to its last. The operator's default is 60.",
    )
    drain_seconds: StrictInt = Field(
        default=30,
        ge=0,
        le=3600,
        json_schema_extra=NO_CRD_DEFAULT,
        description="How long a pod that shall go may finish requests in flight. The operator's default is 30.",
    )


class TransferSpec(ApiModel):
    """How the KV cache moves from prefill to decode."""

    backend: Backend = Field(
        default=Backend.PDCLUSTER,
        description="Who moves the KV: PDCluster (this project's module), or SGLang's own NIXL or Mooncake, whose "
        "limits then apply in the fit check and whose peers the operator does not wire.",
    )
    image: Text | None = Field(
        default=None,
        description="Image with the transfer sidecar and the engine plugin. Defaults to the operator's own.",
    )
    plugin: PluginSpec = Field(default=PluginSpec(), description="The NIXL backend under the transfer.")
    fabric: FabricSpec = Field(default=FabricSpec(), description="The network that carries the KV cache.")
    verification: VerificationSpec = Field(default=VerificationSpec(), description="How the KV path is proven to work.")
    timeouts: TimeoutsSpec = Field(default=TimeoutsSpec(), description="Deadlines of one request's transfer.")


class HierarchicalCacheSpec(ApiModel):
    """SGLang's HiCache: KV kept in host memory or a store for reuse between requests. On when this is set.
    Set ratio or size, not both."""

    ratio: float | None = Field(default=None, gt=0, le=1000, description="Host pool size over device pool size.")
    size: StrictInt | None = Field(default=None, ge=1, le=65536, description="Host pool size per rank in GB.")
    write_policy: Annotated[str, StringConstraints(pattern="^[a-z_]+$", max_length=64)] | None = Field(
        default=None, description="write_through, write_through_selective or write_back."
    )
    layout: Annotated[str, StringConstraints(pattern="^[a-z_]+$", max_length=64)] | None = Field(
        default=None, description="Memory layout of the host pool, for example page_first."
    )
    io_backend: Annotated[str, StringConstraints(pattern="^[a-z_]+$", max_length=64)] | None = Field(
        default=None, description="How pages move between device and host: kernel or direct."
    )
    storage_backend: ShortText | None = Field(
        default=None, description="Third level below host memory, for example file, mooncake or hf3fs."
    )


class EnvVar(ApiModel):
    """An environment variable of the engine container."""

    name: Annotated[str, StringConstraints(pattern="^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=253)] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, StringConstraints(max_length=32768)] | None = Field(
        default=None, description="Its value. Set value or valueFrom."
    )
    value_from: EnvVarSource | None = Field(
        default=None, description="Where its value comes from: a Secret, a ConfigMap or a field of the pod."
    )


class PodTemplate(ApiModel):
    """The narrow set of pod overrides, merged by key over what the operator sets: maps by their keys,
    volumes by name, mounts by path. Keys and names that the operator owns are refused."""

    labels: StringMap = Field(
        default={}, json_schema_extra=_MAP, description="Labels of the pods. Keys under pdcluster.io/ are refused."
    )
    annotations: StringMap = Field(
        default={},
        json_schema_extra=_MAP,
        description="Annotations of the pods. Keys under pdcluster.io/ are refused.",
    )
    node_selector: StringMap = Field(default={}, json_schema_extra=_MAP, description="Labels that a node must have.")
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=64, description="Taints that the pods tolerate.")
    affinity: AnyObject | None = Field(default=None, description="Affinity of the pods, as in a pod's spec.")
    topology_spread_constraints: tuple[AnyObject, ...] = Field(
        default=(), max_length=16, description="How pods spread over nodes, as in a pod's spec."
    )
    scheduler_name: ShortText | None = Field(default=None, description="Scheduler of the pods.")
    priority_class_name: ShortText | None = Field(default=None, description="Priority class of the pods.")
    service_account_name: ShortText | None = Field(
        default=None, description="Service account of the pods, for example to pull models."
    )
    runtime_class_name: ShortText | None = Field(default=None, description="Runtime class of the pods.")
    image_pull_secrets: tuple[PullSecret, ...] = Field(
        default=(), max_length=16, json_schema_extra=_NAMED, description="Secrets to pull the images with."
    )
    volumes: tuple[Volume, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=_NAMED,
        description="Further volumes: a name and one volume source each.",
    )
    volume_mounts: tuple[VolumeMount, ...] = Field(
        default=(),
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["mountPath"]},
        description="Where the engine container (in a router: the router container) mounts them.",
    )
    security_context: AnyObject | None = Field(
        default=None, description="Security context of the pod, as in a pod's spec."
    )
    container_security_context: AnyObject | None = Field(
        default=None, description="Security context of the engine (or router) container, as in a pod's spec."
    )
    termination_grace_period_seconds: StrictInt | None = Field(
        default=None,
        ge=0,
        le=86400,
        description="Grace period of the pods. Unset: derived from spec.transfer.timeouts.",
    )


class RoleSpec(ApiModel):
    """One side of the disaggregated pair."""

    replicas: StrictInt = Field(default=1, ge=0, le=1024, description="Number of engine instances of this role.")
    nodes_per_replica: StrictInt = Field(
        default=1, ge=1, le=64, description="Pods that form one engine instance. More than 1 is not supported yet."
    )
    tensor_parallel_size: StrictInt = Field(
        default=1, ge=1, le=MAX_RANKS, description="Tensor-parallel ranks of one engine instance."
    )
    pipeline_parallel_size: StrictInt = Field(
        default=1, ge=1, le=MAX_RANKS, description="Pipeline stages of one engine instance."
    )
    attention_data_parallel_size: StrictInt = Field(
        default=1,
        ge=1,
        le=MAX_RANKS,
        description="Data-parallel groups of the attention layers; must divide tensorParallelSize.",
    )
    hierarchical_cache: HierarchicalCacheSpec | None = Field(
        default=None, description="SGLang's HiCache. On when this is set."
    )
    extra_args: tuple[Argument, ...] = Field(
        default=(),
        max_length=128,
        description="Further arguments of the engine. Flags that the operator sets itself (host, ports, parallel "
        "sizes, page size, KV dtype, disaggregation mode ...) are refused: use the field instead.",
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=128,
        json_schema_extra=_NAMED,
        description="Further environment variables of the engine container.",
    )
    resources: ResourceRequirements = Field(
        default={}, description="Resources of the engine container, for example {limits: {nvidia.com/gpu: 8}}."
    )
    template: PodTemplate = Field(default=PodTemplate(), description="Overrides of the pods of this role.")


class HostKVSpec(ApiModel):
    """KV that decode receives into host memory."""

    mode: HostKVMode = Field(
        default=HostKVMode.OFF,
        description="Off; HostReceive: the whole KV of a request arrives in host memory; HiSparse: sparse attention "
        "with the full KV in host memory.",
    )
    size: Quantity | None = Field(default=None, description="Host memory per rank for it, for example 64Gi.")


class DecodeSpec(RoleSpec):
    """The decode side: receives the KV cache and generates tokens."""

    host_kv: HostKVSpec = Field(
        default=HostKVSpec(), alias="hostKV", description="KV that decode receives into host memory."
    )


class RouterType(StrEnum):
    SMG = "SMG"
    INFERENCE_POOL = "InferencePool"
    NONE = "None"


class RouterPolicies(ApiModel):
    """How the router picks among the pods of a role."""

    prefill: Annotated[str, StringConstraints(pattern="^[a-z_]+$", max_length=64)] | None = Field(
        default=None, description="Policy over prefill pods, for example cache_aware or round_robin."
    )
    decode: Annotated[str, StringConstraints(pattern="^[a-z_]+$", max_length=64)] | None = Field(
        default=None, description="Policy over decode pods, for example power_of_two or round_robin."
    )


class RouterSpec(ApiModel):
    """What brings requests to the pairs."""

    type: RouterType = Field(
        default=RouterType.SMG,
        description="SMG (SGLang's gateway, run by the operator), InferencePool (a Gateway API picker of your own) "
        "or None.",
    )
    replicas: StrictInt = Field(default=1, ge=0, le=64, description="Number of router pods (SMG).")
    policies: RouterPolicies = Field(
        default=RouterPolicies(), description="How the router picks among the pods of a role."
    )
    image: Text | None = Field(
        default=None, description="Image of the router. Defaults to the one the operator was installed with."
    )
    template: PodTemplate = Field(default=PodTemplate(), description="Overrides of the router's pods.")


class Isolation(StrEnum):
    FIT = "Fit"
    REVISION = "Revision"


class RolloutSpec(ApiModel):
    """How a change of the spec reaches the pods."""

    max_surge: StrictInt | StrictStr = Field(
        default=0,
        json_schema_extra={"x-pd-schema": INT_OR_STRING},
        description="Replicas of a role beyond the wanted number during a rollout: a number or a percentage "
        "(rounded up).",
    )
    max_unavailable: StrictInt | StrictStr = Field(
        default=1,
        json_schema_extra={"x-pd-schema": INT_OR_STRING},
        description="Replicas of a role that may be missing during a rollout: a number or a percentage (rounded down).",
    )
    isolation: Isolation = Field(
        default=Isolation.FIT,
        description="Fit: pods of two revisions serve each other when the fit check passes between them. Revision: "
        "never.",
    )
    progress_deadline_seconds: StrictInt = Field(
        default=600,
        ge=1,
        le=86400,
        json_schema_extra=NO_CRD_DEFAULT,
        description="After this long without progress Progressing becomes False. The operator's default is 600.",
    )


class PDClusterSpec(ApiModel):
    """What a PDCluster shall be."""

    model: ModelSpec = Field(description="What to serve.")
    engine: EngineSpec = Field(description="The inference engine that runs in prefill and decode pods.")
    kv_cache: KVCacheSpec = Field(default=KVCacheSpec(), alias="kvCache", description="What both roles must agree on.")
    transfer: TransferSpec = Field(default=TransferSpec(), description="How the KV cache moves from prefill to decode.")
    prefill: RoleSpec = Field(default=RoleSpec(), description="The prefill side: reads prompts and fills the KV cache.")
    decode: DecodeSpec = Field(
        default=DecodeSpec(), description="The decode side: receives the KV cache and generates tokens."
    )
    router: RouterSpec = Field(default=RouterSpec(), description="What brings requests to the pairs.")
    rollout: RolloutSpec = Field(default=RolloutSpec(), description="How a change of the spec reaches the pods.")
