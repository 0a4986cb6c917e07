"""Label and field selectors as the in-memory API server understands them: equality, and existence of a label."""

from __future__ import annotations

from typing import Any

from pdoperator.kube.port import Manifest


def fields_match(obj: Manifest, selector: str) -> bool:
    """`a.b=c,d=e` field selectors (equality)."""
    for term in (t for t in selector.split(",") if t):
        path, _, value = term.partition("=")
        at: Any = obj
        for step in path.split("."):
            at = (at or {}).get(step)
        if str(at or "") != value:
            return False
    return True


def labels_match(obj: Manifest, selector: str) -> bool:
    """`a=b,c` selectors (equality and existence)."""
    labels = obj["metadata"].get("labels") or {}
    for term in (t.strip() for t in selector.split(",") if t.strip()):
        name, equals, value = term.partition("=")
        if name not in labels or (equals and labels[name] != value):
            return False
    return True
