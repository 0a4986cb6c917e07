"""Family H, continued: plugins and parameters of the transfer library."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, columns, known
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.nixl_params import parse_nixl_params
from pdtransfer.contract.nixl_plugins import PARAMS_VARIABLE as _PARAMS
from pdtransfer.contract.nixl_plugins import PLUGIN_VARIABLE as _PLUGIN
from pdtransfer.contract.nixl_plugins import STORAGE, plugin_problem, unread_parameters

H = Family()
IN_EVERY_WHEEL = "UCX"
"""The plugin that no wheel of NIXL comes without."""
_OF_THE_HOST = frozenset({"device_list", "num_threads"})
"""Parameters that may differ between hosts and roles."""


@H.rule(
    "H4",
    "The NIXL plugin is in the engine's image",
    columns(Outcome.START, Outcome.START),
    needs=("nixl_backend", "nixl_plugins"),
    change="use an engine image that has this plugin, or set spec.transfer.plugin.name to one that it has",
    engines=SGLANG_ONLY,
)
def h4(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    """Before an engine runs, only who looked into its image can tell what NIXL has there; NIXL's own wheels have UCX.
    That a backend takes longer than 60 s to make, which SGLang refuses too, nothing tells before it is tried."""
    for facts in (p, d):
        wanted = known(facts.nixl_backend, facts, "nixl_backend")
        if facts.nixl_plugins is None and wanted == IN_EVERY_WHEEL:
            continue
        there = known(facts.nixl_plugins, facts, "nixl_plugins")
        if wanted not in there:
            return Hit(
                f"{facts.role.value}'s NIXL plugin is {wanted}, and its image has {', '.join(sorted(there)) or 'none'}"
            )
    if p.nixl_plugins is None or d.nixl_plugins is None:
        return Hit(f"NIXL's own wheels have {IN_EVERY_WHEEL}; nobody has looked into this image", outcome=Outcome.FINE)
    return None


@H.rule(
    "H13",
    "Mooncake over TCP",
    columns(mooncake=Outcome.NORM),
    needs=("mooncake_tcp", "ib_device"),
    change="leave --disaggregation-ib-device out, or use transfer backend mooncake with RDMA",
    engines=SGLANG_ONLY,
)
def h13(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = known(p.mooncake_tcp, p, "mooncake_tcp"), known(d.mooncake_tcp, d, "mooncake_tcp")
    if not ours and not theirs:
        return None
    if ours and theirs:
        return Hit("both sides: mooncake_tcp is Mooncake with MC_FORCE_TCP=1, without RDMA", outcome=Outcome.FINE)
    over = "prefill" if ours else "decode"
    # From Mooncake's MultiTransport::selectTransport; not run. The other side's environment may say TCP, too.
    return Hit(
        f"{over} alone runs mooncake_tcp: Mooncake takes the transport that the receiver has, and a sender without it "
        "refuses",
        change="use mooncake_tcp on both roles or on neither",
        outcome=Outcome.WARN,
    )


@H.rule(
    "H14",
    "NIXL's plugin carries KV and reads its parameters",
    columns(Outcome.START, Outcome.START),
    needs=("nixl_params",),
    change=f"correct spec.transfer.plugin, or {_PLUGIN} and _PARAMS in env",
)
def h14(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    """SGLang's own backend checks that the parameters are texts, PDCluster's agent also what the plugin reads. A rank
    that runs has passed that, with whatever its NIXL reads. A plugin of which nothing is known may carry KV under
    SGLang's own backend; one for storage never does."""
    for facts in (p, d):
        if backend is Backend.NIXL and facts.nixl_backend in STORAGE:
            return Hit(f"{facts.role.value}: {plugin_problem(facts.nixl_backend, {})}")
    found: list[dict[str, str]] = []
    for facts in (p, d):
        parameters, problem = parse_nixl_params(known(facts.nixl_params, facts, "nixl_params"))
        if problem:
            return Hit(f"{facts.role.value}'s {_PARAMS} {problem}")
        if backend is Backend.PDCLUSTER and facts.nixl_backend is not None and not facts.observed:
            problem = plugin_problem(facts.nixl_backend, parameters)
            if problem:
                return Hit(f"{facts.role.value}: {problem}")
        found.append(parameters)
    return _differing(*found) or (_unread(p, found[0]) or _unread(d, found[1]) if backend is Backend.NIXL else None)


def _differing(prefill: dict[str, str], decode: dict[str, str]) -> Hit | None:
    names = sorted(k for k in {*prefill, *decode} - _OF_THE_HOST if prefill.get(k) != decode.get(k))
    if not names:
        return None
    name = names[0]
    return Hit(
        f"NIXL's parameter {name} is {prefill.get(name, 'not set')} on prefill and {decode.get(name, 'not set')} on "
        "decode",
        change="give both roles the same spec.transfer.plugin.parameters",
        outcome=Outcome.WARN,
        consequence="Agents with other parameters may not reach each other; nothing compares them.",
    )


def _unread(facts: RoleFacts, parameters: dict[str, str]) -> Hit | None:
    names = unread_parameters(facts.nixl_backend or "", parameters)
    if not names:
        return None
    return Hit(
        f"{facts.role.value}: NIXL's {facts.nixl_backend} reads no parameter {names[0]}",
        change=f"remove {names[0]}",
        outcome=Outcome.WARN,
        consequence="It has no effect, and nothing says so.",
    )
