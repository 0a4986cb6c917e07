"""One CEL rule of the CRD, with its twin in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CelRule:
    """One x-kubernetes-validations entry. `path` leads from the root of the object ('[]' is an array's
    items); the message says what to do. `check` is the same rule in Python over the value at `path` (with the
    schema's defaults filled in), for manifests that no API server has seen. `compat` is the fit rule that it
    repeats, if it does."""

    path: tuple[str, ...]
    rule: str
    message: str
    check: Callable[[Any], bool]
    field_path: str = ""
    compat: str = ""

    def to_dict(self) -> dict[str, str]:
        """The entry as the CRD carries it."""
        entry = {"rule": self.rule, "message": self.message}
        if self.field_path:
            entry["fieldPath"] = self.field_path
        return entry
