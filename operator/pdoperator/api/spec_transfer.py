"""spec.transfer: who moves the KV cache, over which network, and how that is proven."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from pdoperator.api.base import NO_CRD_DEFAULT, ApiModel
from pdoperator.api.scalars import MAP, NAMED, Quantity, ShortText, StringMap, Text
from pdtransfer.contract.base import Backend


class FabricType(StrEnum):
    RDMA = "RDMA"
    TCP = "TCP"


class GPUDirect(StrEnum):
    REQUIRED = "Required"
    PREFERRED = "Preferred"
    OFF = "Off"


class TransferStrategy(StrEnum):
    """How slices of unequal tensor parallelism travel; the words are the transfer module's."""

    AUTO = "Auto"
    SLICED = "Sliced"
    STAGED = "Staged"
    MERGE = "Merge"
    SPLIT = "Split"


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
        "resources, resourceClaimTemplate, hostNetwork or privileged.",
    )
    resources: tuple[FabricResource, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=NAMED,
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
        description="Network devices to use, as the engine's transfer library spells them, for example mlx5_0, or for "
        "UCX mlx5_0:1 or eth0. Empty: the library chooses.",
    )
    networks: tuple[ShortText, ...] = Field(
        default=(),
        max_length=64,
        description="Secondary networks (Multus), for example roce-net or ns/net@net1; repeats are kept. Written to "
        "the annotation k8s.v1.cni.cncf.io/networks.",
    )
    annotations: StringMap = Field(
        default={}, json_schema_extra=MAP, description="Further annotations that the fabric needs on engine pods."
    )
    host_network: StrictBool = Field(default=False, description="Run engine pods in the node's network namespace.")
    privileged: StrictBool = Field(
        default=False, description="Run the engine container privileged (some fabrics need it to register memory)."
    )
    gpu_direct: GPUDirect = Field(
        default=GPUDirect.PREFERRED,
        description="Whether the NIC must read and write GPU memory directly. Required: not Ready before it is proven "
        "(this version collects no evidence of it yet). Preferred and Off: nothing is asked for.",
    )


class PluginSpec(ApiModel):
    """NIXL's backend under the transfer, and its parameters (transfer.backend PDCluster and NIXL)."""

    name: Annotated[str, StringConstraints(pattern="^[A-Z][A-Z0-9_]*$", max_length=64)] = Field(
        default="UCX",
        description="NIXL backend: UCX, or LIBFABRIC (EFA needs it; not tried with transfer.backend PDCluster).",
    )
    parameters: StringMap = Field(
        default={},
        json_schema_extra=MAP,
        description="Parameters of the NIXL backend, as strings. UCX: device_list, engine_config (UCX settings, for "
        "example TLS=rc), num_threads, num_workers, split_batch_size, ucx_num_device_channels. LIBFABRIC: "
        "max_bw_per_dram_seg, num_threads, post_queue_size, split_batch_size, striping_threshold. With "
        "transfer.backend PDCluster one that nothing reads is refused.",
    )


class VerificationSpec(ApiModel):
    """What the proof that KV really moves has to show. Pairs are probed when they are wired."""

    min_bandwidth: Quantity | None = Field(
        default=None,
        description="Least bandwidth of a pair of pods in bytes per second, for example 10G. Measured by the "
        "probe when the pair is wired. Unset: measured and shown, never judged.",
    )
    interval_seconds: StrictInt = Field(
        default=60,
        ge=5,
        le=86400,
        json_schema_extra=NO_CRD_DEFAULT,
        description="With backends NIXL and Mooncake, seconds between two real requests of the operator's through each "
        "prefill rank. With PDCluster no effect in this version, which checks a pair when it is wired.",
    )
    recycle: StrictBool = Field(
        default=True,
        json_schema_extra=NO_CRD_DEFAULT,
        description="With backends NIXL and Mooncake, replace a prefill pod whose real requests keep failing (at least "
        "4 in a row over a minute) with decode pods that another prefill serves meanwhile: its bootstrap thread may "
        "have ended, which only a restart repairs. Never the last prefill that serves. False: KVTransferVerified tells "
        "of it, and nothing is replaced. With PDCluster no effect: ranks report by themselves.",
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
        description="Who moves the KV: PDCluster (this project's module; in SGLang as a plugin that the operator puts "
        "beside the unmodified image), or SGLang's own NIXL or Mooncake, whose limits then apply in the fit check and "
        "whose peers the operator does not wire. Mooncake runs over TCP where fabric.type is TCP.",
    )
    image: Text | None = Field(
        default=None,
        description="Image with the transfer sidecar and SGLang's plugin. Defaults to the operator's own.",
    )
    plugin: PluginSpec = Field(default=PluginSpec(), description="The NIXL backend under the transfer.")
    strategy: TransferStrategy = Field(
        default=TransferStrategy.AUTO,
        description="How KV travels between unequal tensor-parallel sizes (backend PDCluster). Auto takes the cheapest "
        "way for each request, by rates measured when peers are wired. Sliced: each token's slice by itself; Staged: "
        "packed, sent in bulk, scattered; Merge and Split: packed on one side only. A way that a pair can not use "
        "fails its requests by name.",
    )
    digest: StrictBool = Field(
        default=False,
        description="Compare a digest of each request's KV before it counts as arrived (backend PDCluster). Costs "
        "about a second per GB on both sides.",
    )
    staging_size: Quantity | None = Field(
        default=None,
        description="Registered memory beside the KV pool for packed slices, per rank and memory kind, for example "
        "64Mi; in whole MiB, rounded down. 0: none, slices are written in place. Unset: 64Mi, at most as much as the "
        "pool (backend PDCluster).",
    )
    quarantine_size: Quantity | None = Field(
        default=None,
        description="KV memory of a decode rank that late writes of failed requests may keep occupied before the rank "
        "takes a new NIXL agent at once, for example 1Gi; in whole MiB, rounded down. Unset: an eighth of the pool "
        "(backend PDCluster).",
    )
    fabric: FabricSpec = Field(default=FabricSpec(), description="The network that carries the KV cache.")
    verification: VerificationSpec = Field(
        default=VerificationSpec(), description="What the proof that KV really moves has to show."
    )
    timeouts: TimeoutsSpec = Field(default=TimeoutsSpec(), description="Deadlines of one request's transfer.")
