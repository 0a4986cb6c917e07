"""What of NIXL's plugin and its parameters can not work, as far as one spec tells."""

from __future__ import annotations

from collections.abc import Mapping

from pdoperator.api.spec import PDClusterSpec, PluginSpec
from pdoperator.domain.facts import environment
from pdoperator.domain.finding import Finding, fail, warn
from pdoperator.domain.revision import role_spec
from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.nixl_params import parse_nixl_params
from pdtransfer.contract.nixl_plugins import (
    DEFAULT,
    PARAMS_VARIABLE,
    PLUGIN_VARIABLE,
    STORAGE,
    named_devices,
    plugin_problem,
    unread_parameters,
)
from pdtransfer.contract.sglang_cli import has_variable

FIELD = "spec.transfer.plugin"


def nixl_findings(spec: PDClusterSpec) -> list[Finding]:
    """Findings about the plugin that each role gets: the spec's, or the one that a role's env names."""
    if spec.transfer.backend is Backend.MOONCAKE:
        if spec.transfer.plugin == PluginSpec():
            return []
        return [
            fail(
                "TransferSetting",
                f"{FIELD} is set, but it is NIXL's and the backend is Mooncake",
                f"Remove {FIELD}, or set spec.transfer.backend to PDCluster or NIXL.",
            )
        ]
    found: list[Finding] = []
    for role in Role:
        where, name, parameters = _asked(spec, role)
        check = _ours if spec.transfer.backend is Backend.PDCLUSTER else _stock
        found += check(spec, where, name, parameters)
    return list(dict.fromkeys(found))  # what both roles say alike is said once


def _asked(spec: PDClusterSpec, role: Role) -> tuple[str, str, Mapping[str, str]]:
    """(who says it, plugin, parameters). What only the pod knows, or can not be read (rule H14), is left out."""
    plugin = spec.transfer.plugin
    variables = environment(spec, role_spec(spec, role))
    name, text = variables.get(PLUGIN_VARIABLE) or DEFAULT, variables.get(PARAMS_VARIABLE, "")
    if has_variable(name) or has_variable(text):
        return FIELD, plugin.name, plugin.parameters
    parameters, _ = parse_nixl_params(text)
    if (name, parameters) == (plugin.name, plugin.parameters):
        return FIELD, name, parameters
    return f"spec.{role.value}.env ({PLUGIN_VARIABLE}, _PARAMS)", name, parameters


def _ours(spec: PDClusterSpec, where: str, name: str, parameters: Mapping[str, str]) -> list[Finding]:
    problem = plugin_problem(name, parameters)
    if problem:
        return [fail("NixlPlugin", f"{where}: {problem}", "Correct it; a rank with it would not start.")]
    devices = spec.transfer.fabric.devices
    if name != DEFAULT:
        found = [
            warn(
                "NixlPlugin",
                f"{where}: backend PDCluster was tried over NIXL's {DEFAULT}, and not over {name}, for want of its "
                "hardware",
                "Watch KVTransferVerified: each pair is probed before it serves.",
            )
        ]
        if devices:
            found.append(
                warn(
                    "NixlPlugin",
                    f"spec.transfer.fabric.devices is set, and NIXL's {name} chooses its devices itself",
                    "Remove spec.transfer.fabric.devices.",
                )
            )
        return found
    named = named_devices(parameters)
    if named and devices:
        return [
            fail(
                "SetTwice",
                f"{where} names network devices in {named}, and so does spec.transfer.fabric.devices",
                "Name them in one place.",
            )
        ]
    return []


def _stock(spec: PDClusterSpec, where: str, name: str, parameters: Mapping[str, str]) -> list[Finding]:
    """SGLang's own backend nixl, which checks neither. (With the Reference engine it is this project's module.)"""
    if spec.engine.type is EngineType.REFERENCE:
        return _ours(spec, where, name, parameters)
    if name in STORAGE:
        problem = plugin_problem(name, {})
        return [fail("NixlPlugin", f"{where}: {problem}", "Choose one of these.")]
    return [
        warn("NixlPlugin", f"{where}: NIXL's {name} reads no parameter {key} and passes over it", f"Remove {key}.")
        for key in unread_parameters(name, parameters)
    ]
