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
    PARAMETERS,
    PARAMS_VARIABLE,
    PLUGIN_VARIABLE,
    named_devices,
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
    found = [f for role in Role for f in _of_role(spec, role)]
    return list(dict.fromkeys(found))  # what both roles say alike is said once


def _of_role(spec: PDClusterSpec, role: Role) -> list[Finding]:
    """That its plugin carries KV, and what it reads, is the fit check's (rule H14)."""
    where, name, parameters = _asked(spec, role)
    if (spec.transfer.backend is Backend.NIXL and spec.engine.type is EngineType.SGLANG) or name not in PARAMETERS:
        return []
    devices, named = spec.transfer.fabric.devices, named_devices(parameters) if name == DEFAULT else ""
    found = []
    if name != DEFAULT:
        found.append(
            warn(
                "NixlPlugin",
                f"{where}: backend PDCluster was tried over NIXL's {DEFAULT}, and not over {name}, for want of its "
                "hardware",
                "Watch KVTransferVerified: each pair is probed before it serves.",
            )
        )
    if devices and name != DEFAULT:
        found.append(
            warn(
                "NixlPlugin",
                f"spec.transfer.fabric.devices is set, and NIXL's {name} chooses its devices itself",
                "Remove spec.transfer.fabric.devices.",
            )
        )
    if devices and named:
        found.append(
            fail(
                "SetTwice",
                f"{where} names network devices in {named}, and so does spec.transfer.fabric.devices",
                "Name them in one place.",
            )
        )
    return found


def _asked(spec: PDClusterSpec, role: Role) -> tuple[str, str, Mapping[str, str]]:
    """(who says it, plugin, parameters). What only the pod knows, or can not be read, is left out."""
    plugin = spec.transfer.plugin
    variables = environment(spec, role_spec(spec, role))
    name, text = variables.get(PLUGIN_VARIABLE) or DEFAULT, variables.get(PARAMS_VARIABLE, "")
    if has_variable(name) or has_variable(text):
        return FIELD, plugin.name, plugin.parameters
    parameters, _ = parse_nixl_params(text)
    if (name, parameters) == (plugin.name, plugin.parameters):
        return FIELD, name, parameters
    return f"spec.{role.value}.env ({PLUGIN_VARIABLE}, _PARAMS)", name, parameters
