"""`pdcluster preflight --server URL --server URL`: do two running servers fit?

Their roles come from their own answers. Of prefill the bootstrap server is asked as well: it is what decode asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from pdoperator.cli_files import draft_layers, model_geometry
from pdoperator.cli_http import Answer, BadURL, get_json, server_url
from pdoperator.cli_output import Unreadable
from pdoperator.domain.preflight import Finding
from pdoperator.domain.preflight_outside import Outside, Side, Stated, check_group
from pdtransfer.contract.base import EngineType, Role
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.sglang_cli import (
    NoServerInfo,
    PrefillRoute,
    ReadFacts,
    prefill_route,
    route_contradictions,
    server_facts,
)

INFO_PATHS = ("/server_info", "/get_server_info")
ROUTE = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


@dataclass(frozen=True)
class ServerOptions:
    """How servers are asked, and what they do not tell."""

    timeout: float = 10.0
    api_key: str = ""
    model_config: str | None = None


def read_server(url: str, options: ServerOptions) -> tuple[str, ReadFacts]:
    """(address, facts) of one server. Raises Unreadable naming it."""
    try:
        address = server_url(url)
    except BadURL as error:
        raise Unreadable(str(error)) from error
    answer = Answer(problem="not asked")
    for path in INFO_PATHS:
        answer = get_json(address + path, options.timeout, options.api_key)
        if answer.status != 404:
            break
    if answer.status in (401, 403):
        raise Unreadable(f"{address} wants an API key: set PDCLUSTER_API_KEY")
    if answer.status == 404:
        raise Unreadable(f"{address} has neither {' nor '.join(INFO_PATHS)}: it is no SGLang server, or another port")
    if answer.problem:
        raise Unreadable(f"{address} can not be read: {answer.problem}")
    try:
        body = answer.body
        source = body.get("model_path") if isinstance(body, dict) else None
        overrides = body.get("json_model_override_args") if isinstance(body, dict) else None
        geometry = model_geometry(
            options.model_config,
            source if isinstance(source, str) else None,
            overrides if isinstance(overrides, str) and overrides != "{}" else None,
        )
        read = server_facts(body, geometry=geometry)
        return address, replace(read, facts=read.facts.model_copy(update=_draft(read.facts)))
    except NoServerInfo as error:
        raise Unreadable(f"{address} can not be read: {error}") from error


def _draft(facts: RoleFacts) -> dict[str, Any]:
    return {"draft_layers": draft_layers(facts.draft_model)} if facts.speculative_algorithm else {}


def _bootstrap(address: str, facts: RoleFacts) -> str:
    host = urlsplit(address).hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{facts.bootstrap_port}"


def _route(address: str, facts: RoleFacts, options: ServerOptions) -> tuple[bool | None, tuple[Finding, ...]]:
    """(whether all ranks are registered, findings) of prefill's bootstrap server."""
    if facts.engine is not EngineType.SGLANG:
        return None, ()
    if facts.bootstrap_port is None:
        raise Unreadable(f"{address} can not be read: its disaggregation_bootstrap_port is missing")
    where = _bootstrap(address, facts)
    answer = get_json(where + ROUTE, options.timeout)
    if answer.status == 503:
        return False, ()  # Rule H7 says what that means.
    if answer.problem and answer.status == 200:
        raise Unreadable(f"prefill's bootstrap server {where} can not be read: {answer.problem}")
    if answer.problem:
        return None, (
            Finding(
                "Route",
                "Unknown",
                f"prefill's bootstrap server {where} can not be read from here: {answer.problem}. Where decode can "
                "not read it either, every request fails",
                "Try it from decode's host; open the port, or set --host 0.0.0.0 on prefill.",
            ),
        )
    try:
        route: PrefillRoute = prefill_route(answer.body)
    except NoServerInfo as error:
        raise Unreadable(f"prefill's bootstrap server {where} can not be read: {error}") from error
    return True, tuple(
        Finding("Route", "Fail", f"prefill {address}: {text}", "Give each prefill a bootstrap port of its own.")
        for text in route_contradictions(route, facts)
    )


def check_servers(urls: Sequence[str], options: ServerOptions, stated: Stated) -> list[Outside]:
    """Whether the prefill server fits each of the decode servers. Raises Unreadable for what can not be read, and
    where there are not one prefill and one or more decode servers."""
    read = [read_server(url, options) for url in urls]
    prefills = [r for r in read if r[1].facts.role is Role.PREFILL]
    decodes = [r for r in read if r[1].facts.role is Role.DECODE]
    if len(prefills) != 1 or not decodes:
        told = ", ".join(f"{address} is a {found.facts.role.value} server" for address, found in read)
        raise Unreadable(f"one prefill server and one or more decode servers are needed: {told}")
    address, found = prefills[0]
    registered, findings = _route(address, found.facts, options)
    alone = {urlsplit(a).hostname for a, _ in decodes} == {urlsplit(address).hostname}
    prefill = _side(address, found, alone, findings, {"route_registered": registered})
    hosts = urlsplit(address).hostname
    return check_group(prefill, [_side(a, d, urlsplit(a).hostname == hosts) for a, d in decodes], stated)


def _side(
    address: str,
    found: ReadFacts,
    same_host: bool,
    findings: tuple[Finding, ...] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Side:
    facts = found.facts.model_copy(update=dict(more))
    told = [Finding("NotRead", "Unknown", f"{facts.role.value}: {p}") for p in found.problems]
    return Side(facts, address, (*told, *findings), assumed=_assumed(facts), same_host=same_host)


def _assumed(facts: RoleFacts) -> tuple[str, ...]:
    if facts.engine is EngineType.REFERENCE:
        return ()
    return ("its environment variables are not seen",)
