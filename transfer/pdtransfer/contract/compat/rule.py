"""What a rule of fit is: an id, what each backend makes of it, and a pure function that decides it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, EngineType
from pdtransfer.contract.facts import RoleFacts

READ_FROM = "0.5.23"
"""The SGLang version whose code the rules were read from."""

T = TypeVar("T")


class Outcome(StrEnum):
    """What happens when a rule is broken and the cluster is run all the same."""

    FINE = "fine"
    START = "START"
    NORM = "NORM"
    WARN = "WARN"
    DCRASH = "DCRASH"
    PDEAD = "PDEAD"
    REQ = "REQ"
    WRONG = "WRONG"
    HANG = "HANG"

    @property
    def tolerable(self) -> bool:
        """Serving goes on correctly: a Warn, not a Fail."""
        return self in (Outcome.NORM, Outcome.WARN)


CONSEQUENCE: Mapping[Outcome, str] = {
    Outcome.FINE: "",
    Outcome.START: "The engine refuses to start.",
    Outcome.NORM: "The engine rewrites the value.",
    Outcome.WARN: "It serves, but not as asked for.",
    Outcome.DCRASH: "The decode server dies at the first request that names this prefill.",
    Outcome.PDEAD: "The prefill rank's bootstrap thread dies while /health stays green; every later request to "
    "that rank hangs until its 300 s timeout.",
    Outcome.REQ: "Requests fail.",
    Outcome.WRONG: "The KV that arrives is silently wrong and so is the output.",
    Outcome.HANG: "Requests hang until they time out, while /health stays green.",
}


MOONCAKE_THREAD = (
    "Mooncake's transfer thread of the prefill rank dies with the error; what is queued for it later hangs until "
    "its 300 s timeout."
)
"""What PDEAD is with Mooncake: there it is not the bootstrap thread."""


class NeedsFact(Exception):
    """Raised inside a rule for a fact that is not known; the checker turns it into Unknown."""

    def __init__(self, facts: RoleFacts, name: str) -> None:
        super().__init__(f"{facts.role.value}.{name}")
        self.facts = facts
        self.name = name


def known(value: T | None, facts: RoleFacts, name: str) -> T:
    """`value`, or NeedsFact when it is None."""
    if value is None:
        raise NeedsFact(facts, name)
    return value


def generation(facts: RoleFacts) -> Accelerator:
    """The accelerator, NeedsFact where it is not known or told as an NVIDIA GPU of any generation."""
    told = facts.accelerator
    return known(None if told is Accelerator.NVIDIA else told, facts, "accelerator")


def attention_tp(facts: RoleFacts) -> int:
    """P or D of the rules. Where the sizes do not divide (rule A2 says so) the floor, at least 1."""
    return facts.attention_tp or max(1, facts.tensor_parallel // (facts.attention_dp * facts.context_parallel))


@dataclass(frozen=True, slots=True)
class Hit:
    """A broken rule: what is wrong, with both values. `change` and `outcome` replace the rule's own."""

    problem: str
    change: str = ""
    outcome: Outcome | None = None
    consequence: str = ""


Decide = Callable[[RoleFacts, RoleFacts, Backend], Hit | None]

BOTH_ENGINES = frozenset({EngineType.SGLANG, EngineType.REFERENCE})
SGLANG_ONLY = frozenset({EngineType.SGLANG})


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `columns` holds the outcome per backend, a backend left out is fine."""

    id: str
    title: str
    columns: Mapping[Backend, Outcome]
    needs: tuple[str, ...]
    change: str
    decide: Decide
    engines: frozenset[EngineType] = BOTH_ENGINES
    since: str = ""
    until: str = ""
    """First version without it."""

    @property
    def family(self) -> str:
        """Letter of the family: A parallelism, B geometry, C speculation, D state, E caches,
        F host KV, G staging, H transport, L layouts of running ranks, V versions."""
        return self.id[0]

    def outcome(self, backend: Backend) -> Outcome:
        """This rule's column for `backend`."""
        return self.columns.get(backend, Outcome.FINE)

    def applies(self, facts: RoleFacts) -> bool:
        """Whether the role's engine and version have this rule. A version that is not known, or
        has no number, is held to it."""
        if facts.engine not in self.engines:
            return False
        version = parse_version(facts.engine_version or "")
        if not version:
            return True
        return (not self.since or version >= parse_version(self.since)) and (
            not self.until or version < parse_version(self.until)
        )


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: `0.5.23.post1` and `v0.5.23` give (0, 5, 23)."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(n) for n in match[1].split(".")) if match else ()


def every(outcome: Outcome) -> dict[Backend, Outcome]:
    """The same column for all backends."""
    return dict.fromkeys(Backend, outcome)


def columns(
    pdcluster: Outcome = Outcome.FINE, nixl: Outcome = Outcome.FINE, mooncake: Outcome = Outcome.FINE
) -> dict[Backend, Outcome]:
    """One column each; what is left out is fine."""
    return {Backend.PDCLUSTER: pdcluster, Backend.NIXL: nixl, Backend.MOONCAKE: mooncake}


class Family:
    """Collects the rules of one family in the order they are written."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def rule(
        self,
        id: str,
        title: str,
        columns: Mapping[Backend, Outcome],
        *,
        needs: tuple[str, ...],
        change: str,
        engines: frozenset[EngineType] = BOTH_ENGINES,
        since: str = "",
        until: str = "",
    ) -> Callable[[Decide], Decide]:
        """Decorator: registers the function as the rule's decision and returns it unchanged."""

        def register(decide: Decide) -> Decide:
            self.rules.append(Rule(id, title, columns, needs, change, decide, engines, since, until))
            return decide

        return register
