"""Families H and V: backends, plugins, and the versions of the two engines."""

from __future__ import annotations

from pdtransfer.contract.base import Backend, EngineType
from pdtransfer.contract.compat.rule import (
    READ_FROM,
    SGLANG_ONLY,
    Family,
    Hit,
    Outcome,
    columns,
    every,
    known,
    parse_version,
)
from pdtransfer.contract.facts import RoleFacts

H = Family()
V = Family()


@H.rule(
    "H1",
    "One transfer backend on both sides",
    columns(Outcome.REQ, Outcome.PDEAD, Outcome.PDEAD),
    needs=("backend",),
    change="set transfer.backend once, and no --disaggregation-transfer-backend in extraArgs (its default is mooncake)",
)
def h1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.backend is d.backend:
        return None
    return Hit(f"prefill uses transfer backend {p.backend.value}, decode {d.backend.value}")


@H.rule(
    "H2",
    "One NIXL plugin on both sides",
    columns(Outcome.REQ, Outcome.PDEAD),
    needs=("nixl_backend",),
    change="set transfer.plugin.name, and no SGLANG_DISAGGREGATION_NIXL_BACKEND in env",
)
def h2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = known(p.nixl_backend, p, "nixl_backend"), known(d.nixl_backend, d, "nixl_backend")
    if ours == theirs:
        return None
    return Hit(f"prefill's NIXL plugin is {ours}, decode's {theirs}")


@V.rule(
    "V1",
    "One engine and version on both sides",
    every(Outcome.REQ),
    needs=("engine", "engine_version"),
    change="run the same engine image on both roles",
)
def v1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.engine is not d.engine:
        return Hit(f"prefill runs {p.engine.value}, decode {d.engine.value}")
    ours, theirs = known(p.engine_version, p, "engine_version"), known(d.engine_version, d, "engine_version")
    if ours == theirs:
        return None
    return Hit(
        f"prefill runs {p.engine.value} {ours}, decode {theirs}",
        consequence="Messages and layouts of two versions are not known to match; nothing compares them.",
    )


@V.rule(
    "V2",
    "The rules were read from this engine version",
    every(Outcome.WARN),
    needs=("engine_version",),
    change=f"run SGLang {READ_FROM}, or verify the pair with real requests before trusting it",
    engines=SGLANG_ONLY,
)
def v2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if facts.engine is not EngineType.SGLANG:
            continue
        version = facts.engine_version
        if version is not None and parse_version(version)[:3] != parse_version(READ_FROM):
            return Hit(
                f"{facts.role.value} runs SGLang {version}, the rules of fit were read from {READ_FROM}",
                consequence="A rule may be missing or too strict for this version.",
            )
    for facts in (p, d):
        known(facts.engine_version, facts, "engine_version")
    return None
