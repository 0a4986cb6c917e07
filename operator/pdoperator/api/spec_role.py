"""spec.prefill and spec.decode: one role, and the pod overrides that routers take as well."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from pdoperator.api.base import ApiModel
from pdoperator.api.kubetypes import (
    AnyObject,
    EnvVarSource,
    PullSecret,
    ResourceRequirements,
    Toleration,
    Volume,
    VolumeMount,
)
from pdoperator.api.scalars import MAP, MAX_RANKS, NAMED, Argument, ShortText, StringMap
from pdoperator.api.spec_cache import (
    DecodeHierarchicalCacheSpec,
    HierarchicalCacheSpec,
    HostKVSpec,
    RetractionBackup,
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
        default={}, json_schema_extra=MAP, description="Labels of the pods. Keys under pdcluster.io/ are refused."
    )
    annotations: StringMap = Field(
        default={},
        json_schema_extra=MAP,
        description="Annotations of the pods. Keys under pdcluster.io/ are refused.",
    )
    node_selector: StringMap = Field(default={}, json_schema_extra=MAP, description="Labels that a node must have.")
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
        default=(), max_length=16, json_schema_extra=NAMED, description="Secrets to pull the images with."
    )
    volumes: tuple[Volume, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=NAMED,
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
        json_schema_extra=NAMED,
        description="Further environment variables of the engine container.",
    )
    resources: ResourceRequirements = Field(
        default={}, description="Resources of the engine container, for example {limits: {nvidia.com/gpu: 8}}."
    )
    template: PodTemplate = Field(default=PodTemplate(), description="Overrides of the pods of this role.")


class DecodeSpec(RoleSpec):
    """The decode side: receives the KV cache and generates tokens."""

    hierarchical_cache: DecodeHierarchicalCacheSpec | None = Field(
        default=None, description="SGLang's HiCache on decode. On when this is set."
    )
    host_kv: HostKVSpec = Field(
        default=HostKVSpec(), alias="hostKV", description="KV that decode receives into host memory."
    )
    radix_cache: StrictBool = Field(
        default=False,
        description="Decode keeps prefixes in device memory, so that prefill sends only the rest of a prompt. "
        "Experimental in SGLang. hierarchicalCache in mode Cache turns it on.",
    )
    retraction_backup: RetractionBackup | None = Field(
        default=None,
        description="Where the KV of a request goes that decode takes off the device for want of room: cpu_tensor; "
        "host_pool, a reserved pool in host memory (no models with recurrent state); none, the request is aborted. "
        "Unset: the engine chooses by the model.",
    )
