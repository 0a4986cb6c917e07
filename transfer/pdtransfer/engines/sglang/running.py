"""The settings that this SGLang runs with, for its cards: what it made of its command line, not the line itself."""

from __future__ import annotations

import logging
from typing import Any

from pdtransfer.contract.sglang_cli import told_settings

log = logging.getLogger(__name__)

Told = tuple[tuple[str, str | int | float | bool | None], ...]


def running_settings(server_args: Any) -> Told:
    """SGLang's resolved settings by its own names, those that some rule of fit reads. Empty where SGLang does not tell
    them: a card without them is a card all the same."""
    try:
        return told_settings(dict(server_args.resolved_dict()) | _settled_with_the_pools())
    except Exception:  # nothing of ours may end SGLang's scheduler, whatever another version raises here
        log.warning("pdcluster: SGLang does not tell its settings; the card goes without them", exc_info=True)
        return ()


def _settled_with_the_pools() -> dict[str, Any]:
    """What SGLang decides only when its KV pools exist, and keeps in its runtime context."""
    from sglang.srt.runtime_context import get_disagg, get_memory

    backup = getattr(get_disagg(), "disaggregation_decode_retraction_backup", None)
    ratio = getattr(get_memory(), "hicache_ratio", None)
    settled = {"disaggregation_decode_retraction_backup": backup, "hicache_ratio": ratio}
    return {name: value for name, value in settled.items() if value is not None}
