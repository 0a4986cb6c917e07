"""status of a PDCluster v1alpha1. Every field is optional on the wire: what was not observed is absent."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from pdoperator.api.base import ApiModel
from pdoperator.api.conditions import ConditionStatus

_NAMED: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Word = Annotated[str, StringConstraints(max_length=256)]
Message = Annotated[str, StringConstraints(max_length=32768)]


def timestamp(seconds: float) -> str:
    """Unix seconds -> RFC 3339 in UTC with whole seconds, as Kubernetes writes times."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> float:
    """RFC 3339 -> Unix seconds. Raises ValueError for anything else."""
    value = datetime.fromisoformat(text)
    if value.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return value.timestamp()


class Condition(ApiModel):
    """metav1.Condition: one aspect of the cluster's state. The message says what to do."""

    type: Annotated[str, StringConstraints(max_length=316)] = Field(
        description="Compatible, FabricReady, PrefillReady, DecodeReady, PeersWired, KVTransferVerified, "
        "RouterReady, Progressing, and Ready, which carries the first failing one's reason and message."
    )
    status: ConditionStatus = Field(description="True, False, or Unknown where it could not be found out.")
    observed_generation: int = Field(
        default=0, ge=0, description="Generation of the spec that this is about.", json_schema_extra={"format": "int64"}
    )
    last_transition_time: Timestamp = Field(description="When the status last changed.")
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Why, as one word for machines."
    )
    message: Message = Field(default="", description="Why, and what to do about it.")


class RevisionCount(ApiModel):
    """Pods of one role at one revision."""

    revision: Word = Field(description="Hash of the spec fields that change pods.")
    pods: int = Field(default=0, ge=0, description="Pods of this revision.")
    ready: int = Field(default=0, ge=0, description="Those of them that are ready.")


class RewriteStatus(ApiModel):
    """A setting that the engine does not take as it was given."""

    name: Word = Field(description="The setting, as in settings.")
    asked: Word = Field(description="What the spec says.")
    effective: Word = Field(description="What the engine uses.")
    reason: Message = Field(default="", description="Why.")


class RoleEngineStatus(ApiModel):
    """Effective settings of a role's engine: what it really runs with, whatever was asked for."""

    settings: dict[str, Word] = Field(
        default={},
        json_schema_extra={"maxProperties": 64},
        description="Settings that matter to the fit of prefill and decode, by name. What is not known is left out.",
    )
    observed: tuple[Word, ...] | None = Field(
        default=None,
        max_length=64,
        description="Those of them that running ranks reported. The others are worked out from the spec.",
    )
    rewrites: tuple[RewriteStatus, ...] | None = Field(
        default=None,
        max_length=32,
        description="What the engine changes of the spec's settings.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )


class RoleStatus(ApiModel):
    """Replicas of one role."""

    wanted: int = Field(default=0, ge=0, description="Replicas that the spec asks for.")
    launched: int = Field(default=0, ge=0, description="Replicas whose pods exist.")
    ready: int = Field(default=0, ge=0, description="Replicas whose pods are Ready, which includes wired.")
    wired: int = Field(default=0, ge=0, description="Replicas wired to every partner of their island.")
    by_revision: tuple[RevisionCount, ...] = Field(
        default=(),
        description="Pods by revision.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["revision"]},
    )
    engine: RoleEngineStatus | None = Field(default=None, description="Effective settings of the role's engine.")


class WiredPairs(ApiModel):
    """Pairs of one prefill and one decode pod."""

    wired: int = Field(default=0, ge=0, description="Pairs that both sides confirmed.")
    wanted: int = Field(default=0, ge=0, description="Pairs that shall be wired.")


class RosterKeyStatus(ApiModel):
    """Key of the newest roster: a pod refuses a lower one."""

    term: int = Field(default=0, ge=0, description="Term of the operator that wrote it.")
    counter: int = Field(default=0, ge=0, description="Counter within the term.")


class VerificationStatus(ApiModel):
    """The last proof that KV really moves."""

    bytes: int = Field(
        default=0, ge=0, description="Bytes that were moved and compared.", json_schema_extra={"format": "int64"}
    )
    seconds: float = Field(default=0.0, ge=0, description="Time that took.")
    bandwidth: int = Field(
        default=0,
        ge=0,
        description="Slowest pair's bandwidth in bytes per second.",
        json_schema_extra={"format": "int64"},
    )
    transport: Word = Field(default="", description="Transport that carried the bytes, for example rc_mlx5 or tcp.")
    evidence: Message = Field(default="", description="How the transport is known.")
    emulated: bool = Field(
        default=False, description="Device memory was emulated on host memory: no statement about a real GPU."
    )
    when: Timestamp | None = Field(default=None, description="When it was measured.")
    pairs: int = Field(default=0, ge=0, description="Pairs of pods that took part.")


class WarningStatus(ApiModel):
    """Something that works, but not as one might expect."""

    rule: Word = Field(default="", description="Id of the fit rule, or of what else noticed it.")
    message: Message = Field(description="What is wrong and what would happen.")
    action: Message = Field(default="", description="What to change.")


class EffectiveStatus(ApiModel):
    """Values that the running engines reported, whatever the flags said."""

    page_size: int | None = Field(default=None, description="Tokens in a page.")
    kv_dtype: Word | None = Field(default=None, description="Dtype of the KV cache.")
    engine: Word | None = Field(default=None, description="Engine program.")
    engine_version: Word | None = Field(default=None, description="Its version.")
    backend: Word | None = Field(default=None, description="Who moves the KV.")
    model_name: Word | None = Field(default=None, description="Name under which the model is served.")
    prefill_tensor_parallel: int | None = Field(default=None, description="Tensor-parallel ranks of prefill.")
    decode_tensor_parallel: int | None = Field(default=None, description="Tensor-parallel ranks of decode.")
    prefill_memory: Word | None = Field(default=None, description="Memory kinds of prefill's KV pool.")
    decode_memory: Word | None = Field(default=None, description="Memory kinds of decode's KV pool.")


class IslandStatus(ApiModel):
    """Pods of which any prefill may serve any decode."""

    name: Word = Field(description="Name of the island, as the router knows it.")
    revisions: tuple[Word, ...] = Field(default=(), description="Revisions in it.")
    prefill: int = Field(default=0, ge=0, description="Ready prefill pods in it.")
    decode: int = Field(default=0, ge=0, description="Ready decode pods in it.")


class CertificateStatus(ApiModel):
    """The certificate that this cluster's pods share, and the CA that signed it."""

    not_after: Timestamp | None = Field(default=None, description="When it ends; it is renewed before.")
    fingerprint: Word = Field(default="", description="First 32 hex digits of the SHA-256 of the CA's certificate.")


class BackoffStatus(ApiModel):
    """Recreation history of one replica slot, kept here so that a restarted operator keeps it."""

    role: Word = Field(description="prefill or decode.")
    replica: int = Field(ge=0, description="Ordinal of the replica.")
    failures: int = Field(default=0, ge=0, description="Failures in a row.")
    not_before: Timestamp | None = Field(default=None, description="Not recreated before this time.")
    last_exit: Message = Field(default="", description="How it ended last.")


class RouterStatus(ApiModel):
    """The router's pods and what they list."""

    wanted: int = Field(default=0, ge=0, description="Router pods that the spec asks for.")
    ready: int = Field(default=0, ge=0, description="Router pods that are ready.")
    workers: int = Field(default=0, ge=0, description="Workers that every router lists.")
    endpoint: Word = Field(default="", description="Where to send requests inside the cluster.")


class Summary(ApiModel):
    """Short strings for `kubectl get`."""

    prefill: Word = Field(default="", description="Ready and wanted prefill replicas, for example 1/1.")
    decode: Word = Field(default="", description="Ready and wanted decode replicas.")
    wired: Word = Field(default="", description="Wired and wanted pairs.")
    verified: Word = Field(default="", description="Measured bandwidth and transport, for example 39.1 GB/s rc_mlx5.")


class PDClusterStatus(ApiModel):
    """What the operator saw."""

    observed_generation: int = Field(
        default=0, ge=0, description="Generation of the spec this is about.", json_schema_extra={"format": "int64"}
    )
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=32, json_schema_extra=_NAMED, description="The state of the cluster, aspect by aspect."
    )
    summary: Summary | None = Field(default=None, description="Short strings for `kubectl get`.")
    revision: Word | None = Field(default=None, description="Revision of the current spec.")
    prefill: RoleStatus | None = Field(default=None, description="Prefill replicas.")
    decode: RoleStatus | None = Field(default=None, description="Decode replicas.")
    wired: WiredPairs | None = Field(default=None, description="Wired pairs of pods.")
    roster_key: RosterKeyStatus | None = Field(default=None, description="Key of the newest roster.")
    verification: VerificationStatus | None = Field(default=None, description="Last proof that KV really moves.")
    warnings: tuple[WarningStatus, ...] = Field(
        default=(), max_length=64, description="What works, but not as one might expect."
    )
    effective: EffectiveStatus | None = Field(default=None, description="Values that the running engines reported.")
    islands: tuple[IslandStatus, ...] = Field(
        default=(),
        max_length=64,
        description="Groups of pods that may serve each other.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    router: RouterStatus | None = Field(default=None, description="The router's pods and what they list.")
    incarnations: dict[str, Word] | None = Field(
        default=None,
        description="UID of each engine pod, and which start of its engine was seen last. A restarted operator "
        "compares with it and tells which engines started again meanwhile.",
    )
    certificates: CertificateStatus | None = Field(default=None, description="The certificate of the pods.")
    backoff: tuple[BackoffStatus, ...] = Field(
        default=(),
        description="Replica slots that failed lately.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["role", "replica"]},
    )

    def to_dict(self) -> dict[str, Any]:
        """JSON for the status subresource: what was not observed is left out."""
        told = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        # An empty list is a line of noise in `kubectl describe`.
        return {k: v for k, v in told.items() if v != []}
