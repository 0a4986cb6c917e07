"""A rewrite, and the draft in which the passes collect them."""

from __future__ import annotations

from dataclasses import dataclass

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Role
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import ModelGeometry
from pdtransfer.contract.launch_defaults import LAUNCH_DEFAULTS

Value = str | int | float | bool | None

FROM_CARDS = frozenset(
    {
        "page_size",
        "kv_dtype",
        "backend",
        "nixl_backend",
        "model_dtype",
        "speculative_algorithm",
        "attention_data_parallel",
        "data_parallel",
        "context_parallel",
        "dp_attention_flag",
    }
)
"""Facts that a card tells: where the engine runs they are what it is, and nothing rewrites them."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One value that the engine does not take as it was given.

    `asked` is None where nothing was set, `effective` None where it depends on something that is
    not known (`why` says on what). `rule` is the rule of fit that speaks of it, `source` the place in
    SGLang's code (package sglang.srt)."""

    field: str
    asked: Value
    effective: Value
    why: str
    source: str
    rule: str
    adds: bool = False
    """What was asked for holds, and something is added to it."""

    @property
    def overrides(self) -> bool:
        """Something that was set is changed; else only a default, or a choice that was left to the engine."""
        if self.adds or self.asked is None:
            return False
        return self.asked != LAUNCH_DEFAULTS.get(self.field, "auto")


@dataclass(frozen=True, slots=True)
class Effective:
    """What the engine will run with, and how it differs from what was asked."""

    facts: RoleFacts
    rewrites: tuple[Rewrite, ...] = ()

    def rewrite(self, field: str) -> Rewrite | None:
        """The rewrite of this fact, or None."""
        return next((r for r in self.rewrites if r.field == field), None)


class Draft:
    """One role on one kind of accelerator, while the passes work on it.

    `now` holds the values so far. Passes read it, and write through `set` only."""

    def __init__(self, asked: RoleFacts, geometry: ModelGeometry | None, accelerator: Accelerator) -> None:
        self.asked = asked
        self.now = asked
        self.geometry = geometry
        self.accelerator = accelerator
        self.rewrites: dict[str, Rewrite] = {}
        self.touched: set[str] = set()
        self.keeps_pages = False
        """The attention backend is not known, and it is one that takes pages of any size."""

    @property
    def prefill(self) -> bool:
        """The role is prefill."""
        return self.asked.role is Role.PREFILL

    @property
    def decode(self) -> bool:
        """The role is decode."""
        return self.asked.role is Role.DECODE

    def unset(self, field: str) -> bool:
        """Known not to be set (`''` or None in a command that is known whole)."""
        value = getattr(self.now, field)
        return value == "" or (value is None and self.now.whole_command)

    def fill(self, **values: Value) -> None:
        """The engine's plain defaults where nothing was set: no rewrite to speak of."""
        unset = {name: value for name, value in values.items() if getattr(self.now, name) is None}
        if unset and self.now.whole_command:
            self.now = self.now.model_copy(update=unset)

    def quietly(self, **values: Value | ModelGeometry) -> None:
        """Changes that belong to a rewrite which is told by another field."""
        if not self.now.observed:
            self.now = self.now.model_copy(update=values)

    def set(
        self, rule: str, field: str, value: Value, why: str, source: str, asked: Value = None, adds: bool = False
    ) -> None:
        """Change `field`; further changes of one field are kept as one rewrite. `asked` is what to show where
        it is not the field's own value."""
        if self.now.observed and field in FROM_CARDS:
            return
        if getattr(self.now, field) == value:
            return
        self.touched.add(field)
        self.now = self.now.model_copy(update={field: value})
        asked = asked or _plain(getattr(self.asked, field))
        before = self.rewrites.pop(field, None)
        if before is not None and before.why:
            why = f"{before.why}; {why}"
        if asked != value:
            self.rewrites[field] = Rewrite(field, asked, value, why, source, rule, adds)


def _plain(value: object) -> Value:
    """A fact for a rewrite: '' (not set) as None."""
    if isinstance(value, str | int | float | bool):
        return str(value) if isinstance(value, str) and value else (None if value == "" else value)
    return None
