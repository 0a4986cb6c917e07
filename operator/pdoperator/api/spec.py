"""spec of a PDCluster v1alpha1. Every description here and in spec_*.py is what `kubectl explain pdc.spec...` prints.

Import the models of all parts from here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictInt, StrictStr, StringConstraints

from pdoperator.api.base import NO_CRD_DEFAULT, ApiModel
from pdoperator.api.kubetypes import INT_OR_STRING
from pdoperator.api.scalars import Text
from pdoperator.api.spec_cache import (
    DecodeCacheMode,
    DecodeHierarchicalCacheSpec,
    HierarchicalCacheSpec,
    HiSparseSpec,
    HostKVSpec,
)
from pdoperator.api.spec_model import (
    EngineSpec,
    GeometrySpec,
    KVCacheSpec,
    ModelSpec,
)
from pdoperator.api.spec_role import DecodeSpec, EnvVar, PodTemplate, RoleSpec
from pdoperator.api.spec_transfer import (
    FabricResource,
    FabricSpec,
    FabricType,
    GPUDirect,
    PluginSpec,
    TimeoutsSpec,
    TransferSpec,
    TransferStrategy,
    VerificationSpec,
)

__all__ = [
    "DecodeCacheMode",
    "DecodeHierarchicalCacheSpec",
    "DecodeSpec",
    "EngineSpec",
    "EnvVar",
    "FabricResource",
    "FabricSpec",
    "FabricType",
    "GPUDirect",
    "GeometrySpec",
    "HiSparseSpec",
    "HierarchicalCacheSpec",
    "HostKVSpec",
    "Isolation",
    "KVCacheSpec",
    "ModelSpec",
    "PDClusterSpec",
    "PluginSpec",
    "PodTemplate",
    "RoleSpec",
    "RolloutSpec",
    "RouterPolicies",
    "RouterSpec",
    "RouterType",
    "TimeoutsSpec",
    "TransferSpec",
    "TransferStrategy",
    "VerificationSpec",
]


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
    max_top_logprobs: StrictInt | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="Most top_logprobs that a request can ask for, where something in front of the router refuses "
        "more. Stated, not enforced: one request with more than 128 ends SGLang's prefill server, and SMG lets any "
        "number through on /v1/completions and /generate. Unset: the fit check warns of it.",
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
