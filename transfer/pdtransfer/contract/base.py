"""Shared base of every contract model, and the few words all of them use."""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict


class ContractModel(BaseModel):
    """Frozen value object. Unknown fields are ignored, so that a newer peer can add some
    (a fact an old peer does not know can not be one it has to check)."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Role(StrEnum):
    """Side of a disaggregated pair. Encoder roles join here later."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The side this one exchanges KV with."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class EngineType(StrEnum):
    """Engine program in a pod."""

    SGLANG = "SGLang"
    REFERENCE = "Reference"


class Backend(StrEnum):
    """Who moves the KV. PDCLUSTER is this module; the others are SGLang's own backends,
    whose limits then apply (with the Reference engine they are emulated, and labelled so)."""

    PDCLUSTER = "PDCluster"
    NIXL = "NIXL"
    MOONCAKE = "Mooncake"


class MemoryKind(StrEnum):
    """NIXL memory segment a region is registered in."""

    VRAM = "VRAM"
    DRAM = "DRAM"


def stable(model: ContractModel) -> dict[str, Any]:
    """A model for hashing: without what is at its default, so that a field that a newer peer knows and
    does not use changes no hash (one that it does use must)."""
    return model.model_dump(mode="json", exclude_defaults=True)


def canonical_json(value: Any) -> bytes:
    """Deterministic JSON (sorted keys, no spaces): equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def content_hash(value: Any) -> str:
    """Hex SHA-256 (first 32 digits) over `canonical_json`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:32]
