"""What two real SGLang 0.5.23 servers answered (a P/D pair on a CPU, TP 2 and 1, backend nixl)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parent / "operator_domain" / "sglang_answers"


def answer(name: str) -> dict[str, Any]:
    """One of them by its file's name: prefill_server_info, decode_server_info, prefill_route."""
    body: dict[str, Any] = json.loads((ANSWERS / f"{name}.json").read_text())
    return body
