"""`pdcluster preflight --server URL --server URL`: do two running servers fit?

Their roles come from their own answers. Of prefill the bootstrap server is asked as well: it is what decode asks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from urllib.parse import urlsplit

from pdoperator.cli_files import model_geometry
from pdoperator.cli_http import Answer, BadURL, get_json, server_url
from pdoperator.cli_output import Unreadable
from pdoperator.domain.preflight import Finding
from pdoperator.domain.preflight_outside import Outside, Side, check_pair
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
        return address, server_facts(body, geometry=geometry)
    except NoServerInfo as error:
        raise Unreadable(f"{address} can not be read: {error}") from error


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


def check_servers(urls: tuple[str, str], options: ServerOptions) -> Outside:
    """Whether the two fit. Raises Unreadable for what can not be read, and for two of one role."""
    read = [read_server(url, options) for url in urls]
    by_role = {facts.facts.role: (address, facts) for address, facts in read}
    if len(by_role) < 2:
        role = read[0][1].facts.role
        raise Unreadable(f"{read[0][0]} and {read[1][0]} are both {role.value} servers: one of each role is needed")
    same_host = len({urlsplit(address).hostname for address, _ in read}) == 1
    sides = {}
    for role in Role:
        address, found = by_role[role]
        facts = found.facts
        findings = [Finding("NotRead", "Unknown", f"{role.value}: {p}") for p in found.problems]
        if role is Role.PREFILL:
            registered, told = _route(address, facts, options)
            facts = facts.model_copy(update={"route_registered": registered})
            findings += told
        if same_host:
            # On one host a loopback address is reached.
            facts = facts.model_copy(update={"host": None})
        side = Side(facts, address, tuple(findings), assumed=())
        sides[role] = dataclasses.replace(side, assumed=_assumed(facts))
    return check_pair(sides[Role.PREFILL], sides[Role.DECODE])


def _assumed(facts: RoleFacts) -> tuple[str, ...]:
    if facts.engine is EngineType.REFERENCE:
        return ()
    return ("its environment variables are not seen",)
