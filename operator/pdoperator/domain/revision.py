"""Revision hash of a role: over the spec fields that change its pods, and nothing else.

Replicas, router, rollout and verification are left out, and for prefill those settings of spec.transfer that are
decode's alone; the rendered pod is never hashed (an operator upgrade would roll the fleet). Fields left at their
default are left out as well, so that a field added to the API later does not change old hashes.
"""

from __future__ import annotations

from typing import Any

from pdoperator.api.spec import Isolation, PDClusterSpec, RoleSpec
from pdoperator.domain.transfer_settings import DECODE_ONLY
from pdtransfer.contract.base import Backend, Role, content_hash

_HASH_DIGITS = 8


def role_spec(spec: PDClusterSpec, role: Role) -> RoleSpec:
    """The prefill or decode part of a spec."""
    return spec.prefill if role is Role.PREFILL else spec.decode


def revision_fields(spec: PDClusterSpec, role: Role) -> dict[str, Any]:
    """What the hash of one role covers."""
    whole = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    left_out = {"verification", *(DECODE_ONLY if role is Role.PREFILL else ())}
    transfer = {k: v for k, v in whole.get("transfer", {}).items() if k not in left_out}
    own = {k: v for k, v in whole.get(role.value, {}).items() if k != "replicas"}
    return {
        "model": {k: v for k, v in whole.get("model", {}).items() if k != "geometry"},
        "engine": whole.get("engine", {}),
        "kvCache": whole.get("kvCache", {}),
        "transfer": transfer,
        "role": own,
    }


def role_revision(spec: PDClusterSpec, role: Role) -> str:
    """Eight hex digits. Roles roll on their own, so that an edit of decode leaves prefill pods alone;
    with `rollout.isolation: Revision`, and with backends that give no cards to check fit on, both
    roles share one hash and roll together."""
    if spec.rollout.isolation is Isolation.REVISION or spec.transfer.backend is not Backend.PDCLUSTER:
        return content_hash([revision_fields(spec, r) for r in Role])[:_HASH_DIGITS]
    return content_hash(revision_fields(spec, role))[:_HASH_DIGITS]


def role_revisions(spec: PDClusterSpec) -> dict[Role, str]:
    """Current revision of each role."""
    return {role: role_revision(spec, role) for role in Role}
