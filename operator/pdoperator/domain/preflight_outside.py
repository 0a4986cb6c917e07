"""Does a pair fit that this operator does not run? From two command lines, or from what two servers say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from pdoperator.domain.flag_words import in_flags
from pdoperator.domain.preflight import Finding, Preflight
from pdtransfer.contract import compat
from pdtransfer.contract.base import Role
from pdtransfer.contract.compat.checker import CARD_FACTS, RUNNING_FACTS, STATED_FACTS
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.sglang_cli import BY_DEST, READ_FROM, VARIABLE_OF, Flags, is_read

REACHABLE = "H5"
"""Rule about the addresses that servers listen on."""

_HOW_TO_KNOW: Mapping[str, str] = {
    "geometry": "pass --model-config with the model's config.json",
    "engine_version": "pass --engine-version",
    "page_size": "set --page-size on both sides, or pass --model-config and --gpu, from which it follows",
    "accelerator": "pass --gpu, or --prefill-gpu and --decode-gpu",
    "decode_tp_sizes": "pass every decode group that this prefill serves",
    "nixl_plugins": "pass --nixl-plugins; {}",
    "max_top_logprobs": "pass --max-top-logprobs; {}",
}


def _how(fact: str) -> str:
    """What makes this fact known; '' where nothing does."""
    if fact in VARIABLE_OF:
        return f"compare {VARIABLE_OF[fact]} in the environments of both sides"
    return _HOW_TO_KNOW.get(fact, "").format(STATED_FACTS.get(fact, ""))


def _untold(rule: compat.Rule, sides: tuple[RoleFacts, ...]) -> str:
    """The first fact of the rule that neither is known nor will be once ranks show cards; '' without one."""
    waits = CARD_FACTS | RUNNING_FACTS
    return next((n for n in rule.needs if n not in waits and any(getattr(s, n) is None for s in sides)), "")


@dataclass(frozen=True)
class Side:
    """One side as it was read. `source` is what messages call it, `findings` what reading it brought up."""

    facts: RoleFacts
    source: str
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[str, ...] = ()
    """Flags that were given and that no rule of fit reads."""
    assumed: tuple[str, ...] = ()
    same_host: bool = False
    """It runs on one host with the other side."""

    @property
    def role(self) -> Role:
        """Side of the pair."""
        return self.facts.role

    def to_dict(self) -> dict[str, Any]:
        """For JSON: where it is from, the facts that are known, and what was not checked."""
        # JSON has no NaN, which a server may have told.
        facts = self.facts.model_dump(mode="json", exclude_none=True)
        return {
            "source": self.source,
            "facts": {name: value for name, value in facts.items() if not isinstance(value, float) or isfinite(value)},
            "notChecked": list(self.not_checked),
            "assumed": list(self.assumed),
        }


@dataclass(frozen=True)
class Outside:
    """Answer about a pair, with the sides that it is about."""

    result: Preflight
    sides: tuple[Side, ...] = field(default=())


def flag_findings(role: Role, flags: Flags, engine_version: str | None) -> tuple[Finding, ...]:
    """What SGLang refuses of a command line. A flag that its version 0.5.23 does not have may be one of another
    version: without a version that is not known."""
    found: list[Finding] = []
    if flags.given("help"):
        message = f"{role.value}: with --help SGLang prints its help and ends."
        found.append(Finding("EngineFlag", "Fail", message, "Leave --help out."))
    for problem in flags.problems:
        name = problem.partition(":")[0]
        if name in flags.unknown and engine_version != READ_FROM:
            found.append(
                Finding(
                    "EngineFlag",
                    "Unknown",
                    f"{role.value}: not checked: {problem}, and refuses to start with it; another version may have it",
                    "Correct the flag, or pass --engine-version.",
                )
            )
        else:
            found.append(
                Finding("EngineFlag", "Fail", f"{role.value}: {problem}. SGLang refuses to start.", "Correct the flag.")
            )
    found += [
        Finding(
            "EngineFlag",
            "Unknown",
            f"{role.value}: {value} is no value of SGLang {READ_FROM}'s own: it refuses to start unless a plugin "
            "brings it in",
            "Correct the value, or install its plugin on this side.",
        )
        for value in flags.foreign
    ]
    return tuple(found)


def role_finding(role: Role, named: Role | None) -> tuple[Finding, ...]:
    """A command line that starts the other side, or none."""
    if named is role:
        return ()
    says = f"--disaggregation-mode {named.value}" if named else "no --disaggregation-mode"
    return (
        Finding(
            "Role",
            "Fail",
            f"the command line for {role.value} has {says}: it does not start a {role.value} server",
            f"Pass --disaggregation-mode {role.value}"
            + (", or swap the two command lines." if named is role.other else "."),
        ),
    )


def unread(flags: Flags) -> tuple[str, ...]:
    """Names of the flags that were given and that no rule of fit reads."""
    skip = ("config", "help")
    return tuple(sorted(BY_DEST[d].name for d in (*flags.values, *flags.hidden) if not is_read(d) and d not in skip))


@dataclass(frozen=True)
class Stated:
    """What neither a command line nor a server tells, as the user states it. None: not stated."""

    max_top_logprobs: int | None = None
    nixl_plugins: frozenset[str] | None = None
    """Those that NIXL finds in both images."""


def check_group(prefill: Side, decodes: Sequence[Side], stated: Stated) -> list[Outside]:
    """Prefill with each of the decode groups that it serves; one that is not among them is assumed not to be there."""
    sizes = frozenset(d.facts.attention_tp for d in decodes if d.facts.attention_tp is not None)
    told: dict[str, Any] = {"max_top_logprobs": stated.max_top_logprobs}
    if stated.nixl_plugins is not None:
        told["nixl_plugins"] = stated.nixl_plugins
    alone = ("it serves no other decode group than " + ("this one" if len(decodes) == 1 else "these"),)
    prefill = replace(
        prefill,
        facts=prefill.facts.model_copy(update=told | {"decode_tp_sizes": sizes or None}),
        assumed=(*prefill.assumed, *alone),
    )
    return [check_pair(prefill, replace(d, facts=d.facts.model_copy(update=told))) for d in decodes]


def check_pair(prefill: Side, decode: Side) -> Outside:
    """Everything that can be said about the two."""
    findings = [*prefill.findings, *decode.findings]
    report = compat.check(prefill.facts, decode.facts)
    for rule in compat.RULES:
        # There is no other time: these are servers of somebody who has no spec.
        if rule.id in report.deferred and (fact := _untold(rule, (prefill.facts, decode.facts))):
            message = f"{rule.title}: {fact.replace('_', ' ')} is not known."
            findings.append(Finding(rule.id, "Unknown", message, _how(fact)))
    for f in report.findings:
        fact = f.needs.rpartition(".")[2]
        if fact in CARD_FACTS:
            continue  # Only a rank that runs pdtransfer tells it.
        if f.rule == REACHABLE and prefill.same_host and decode.same_host:
            findings.append(Finding(f.rule, "Pass", "both roles run on one host, where each reaches the other"))
            continue
        action = in_flags(f.action)
        if f.needs:
            where = "its answer" if prefill.facts.observed else "a command line"
            action = _how(fact) or f"{where} does not tell it: compare it on both sides"
        findings.append(Finding(f.rule, f.status.value, f.message or f.title, action))
    return Outside(Preflight(tuple(findings)), (prefill, decode))
