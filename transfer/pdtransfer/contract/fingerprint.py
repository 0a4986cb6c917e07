"""Hash over what must be equal on both sides of a transfer, and hash over one rank's layout.

Pods are grouped by these, so that checking N x M pods costs the number of distinct layouts.
"""

from __future__ import annotations

from pdtransfer.contract.base import ContractModel, content_hash, stable
from pdtransfer.contract.layout import RankLayout


class ModelIdentity(ContractModel):
    """Which weights a rank serves, as read from the engine: equal on both sides or nothing moves."""

    name: str
    revision: str = ""
    """Repository revision or content digest of the checkpoint; empty when the engine can't tell."""
    dtype: str
    layers: int
    total_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    kv_store_speculation: str = ""
    """Speculative algorithm that stores draft KV (EAGLE ...); empty for none or n-gram."""


def pair_fingerprint(model: ModelIdentity, layout: RankLayout) -> str:
    """Equal on two ranks whose KV may be exchanged: model, KV dtype and page size.

    TP, PP, memory kinds and pool sizes are left out: the transfer plan bridges those."""
    return content_hash(
        {
            "v": 1,
            "model": stable(model),
            "kv_dtype": layout.kv_dtype,
            "page_tokens": layout.page_tokens,
        }
    )


def layout_fingerprint(layout: RankLayout) -> str:
    """Hash of a layout without addresses and devices (which differ between equal pods)."""
    data = stable(layout)
    for region in data.get("regions", ()):
        region.pop("address", None)
        region.pop("device", None)
    return content_hash(data)


def metadata_fingerprint(metadata: str) -> str:
    """Hash of a rank's NIXL metadata as its card carries it; empty where there is none."""
    return content_hash(metadata) if metadata else ""
