"""Families H and V: backends, endpoints, and the versions of the two engines."""

from __future__ import annotations

from ipaddress import ip_address

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


def is_loopback(host: str) -> bool:
    """True for an address that only its own pod reaches."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@H.rule(
    "H5",
    "Servers listen where the other pods reach them",
    every(Outcome.REQ),
    needs=("host",),
    change="set --host 0.0.0.0 (SGLang's default is 127.0.0.1)",
)
def h5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        host = facts.host
        if host is not None and is_loopback(host):
            other = "decode can't fetch its bootstrap data" if facts is p else "the router can't reach it"
            return Hit(f"{facts.role.value} listens on {host}: {other}")
    for facts in (p, d):
        known(facts.host, facts, "host")
    return None


@H.rule(
    "H6",
    "One bootstrap port",
    every(Outcome.WARN),
    needs=("bootstrap_port",),
    change="set the same --disaggregation-bootstrap-port on both roles",
)
def h6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = known(p.bootstrap_port, p, "bootstrap_port"), known(d.bootstrap_port, d, "bootstrap_port")
    if ours == theirs:
        return None
    return Hit(
        f"prefill's bootstrap port is {ours}, decode falls back to {theirs}",
        consequence="A request that names no bootstrap_port fails; one that does (as the router's do) is served.",
    )


@H.rule(
    "H10",
    "Sampling mask on both sides or neither",
    columns(nixl=Outcome.HANG, mooncake=Outcome.HANG),
    needs=("sampling_mask",),
    change="set SGLANG_ENABLE_DISAGG_SAMPLING_MASK alike on both roles",
    engines=SGLANG_ONLY,
)
def h10(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.sampling_mask is None and d.sampling_mask is None:
        return None  # Neither side speaks of it, and it is off by default.
    ours, theirs = known(p.sampling_mask, p, "sampling_mask"), known(d.sampling_mask, d, "sampling_mask")
    if ours == theirs:
        return None
    return Hit(f"SGLANG_ENABLE_DISAGG_SAMPLING_MASK is {ours} on prefill and {theirs} on decode")


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
