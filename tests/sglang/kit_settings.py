"""Servers as the comparisons of settings with SGLang describe them: small models, machines, command lines.

`ask` gives SGLang's own answers, `as_facts` the same server as facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kit_configs import CONFIGS
from kit_driver import ask_driver

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Role
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import from_hf_config
from pdtransfer.contract.sglang_cli import command_facts, read_flags

RESOLVE_S = 500


@dataclass(frozen=True)
class Case:
    """One server: `argv` after the model, with its role."""

    model: str
    accelerator: str
    role: Role
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        """For messages."""
        variables = " ".join(f"{k}={v}" for k, v in self.environment.items())
        return f"{variables} {self.model} on {self.accelerator}, {self.role.value}: {' '.join(self.argv)}".strip()

    @property
    def command(self) -> list[str]:
        """All arguments but the model."""
        backend = (
            [] if "--disaggregation-transfer-backend" in self.argv else ["--disaggregation-transfer-backend", "nixl"]
        )
        return ["--disaggregation-mode", self.role.value, *backend, *self.argv]


def ask(cases: Sequence[Case], fields: Sequence[str], *, check: bool = False) -> dict[str, dict[str, Any]]:
    """SGLang's answer to every case by its id, from one process of its own Python. `check`: it also checks what it
    resolved, as its launcher does."""
    asked = [
        {
            "config": CONFIGS[c.model],
            "accelerator": c.accelerator,
            "argv": c.command,
            "environment": c.environment,
            "fields": list(fields),
            "check": check,
        }
        for c in cases
    ]
    return dict(zip((c.id for c in cases), ask_driver("resolve_driver.py", asked, RESOLVE_S), strict=True))


def as_facts(case: Case) -> RoleFacts:
    """The same server as facts, through our reader of command lines."""
    asked = command_facts(
        case.role,
        read_flags(case.command),
        case.environment,
        geometry=from_hf_config(CONFIGS[case.model]),
        accelerator=Accelerator(case.accelerator),
        engine_version="0.5.23",
    )
    assert not asked.problems, asked.problems
    return asked.facts
