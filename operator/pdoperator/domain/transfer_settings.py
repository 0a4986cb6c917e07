"""spec.transfer's settings of the transfer module, as flags of the Reference engine and as environment of SGLang's
plugin. What the spec leaves at its default is left out, so that the module's own default applies.

Strategy, digest and quarantine are decode's: it asks, prefill obeys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pdoperator.api.quantities import parse_quantity
from pdoperator.api.spec import PDClusterSpec, TransferStrategy
from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.nixl_plugins import DEFAULT, PARAMS_VARIABLE, PLUGIN_VARIABLE

MIB = 1 << 20
PLUGIN_ENV = (
    "PDTRANSFER_STRATEGY",
    "PDTRANSFER_DIGEST",
    "PDTRANSFER_STAGING_MIB",
    "PDTRANSFER_QUARANTINE_MIB",
)
"""Names of the variables that `setting_env` sets; a spec's env may not."""
DECODE_ONLY = ("strategy", "digest", "quarantineSize")
"""Fields of spec.transfer (JSON names) that change decode's pods alone."""


def whole_mib(quantity: str) -> int:
    """MiB of a quantity, rounded down: '64Mi' -> 64, '100M' -> 95. ValueError for what is no quantity."""
    return int(parse_quantity(quantity) // Decimal(MIB))


@dataclass(frozen=True)
class _Settings:
    """What the spec says otherwise than the defaults; None where it says nothing."""

    strategy: str | None
    digest: bool
    staging_mib: int | None
    quarantine_mib: int | None


def _settings(spec: PDClusterSpec, side: Role) -> _Settings:
    transfer = spec.transfer
    decode = side is Role.DECODE
    forced = transfer.strategy is not TransferStrategy.AUTO
    return _Settings(
        strategy=transfer.strategy.value.lower() if decode and forced else None,
        digest=decode and transfer.digest,
        staging_mib=None if transfer.staging_size is None else whole_mib(transfer.staging_size),
        quarantine_mib=(
            whole_mib(transfer.quarantine_size) if decode and transfer.quarantine_size is not None else None
        ),
    )


def reference_flags(spec: PDClusterSpec, side: Role) -> list[str]:
    """Flags of the Reference engine."""
    said = _settings(spec, side)
    flags = [] if said.strategy is None else ["--kv-strategy", said.strategy]
    flags += ["--kv-digest"] if said.digest else []
    flags += [] if said.staging_mib is None else ["--kv-staging-mib", str(said.staging_mib)]
    flags += [] if said.quarantine_mib is None else ["--kv-quarantine-mib", str(said.quarantine_mib)]
    return flags


def nixl_env(spec: PDClusterSpec) -> list[dict[str, Any]]:
    """NIXL's plugin and its parameters for either engine, in SGLang's own variables, where they are not the default."""
    plugin = spec.transfer.plugin
    if spec.transfer.backend is Backend.MOONCAKE:
        return []
    env = [] if plugin.name == DEFAULT else [{"name": PLUGIN_VARIABLE, "value": plugin.name}]
    if plugin.parameters:
        text = json.dumps(dict(sorted(plugin.parameters.items())), separators=(",", ":"))
        env.append({"name": PARAMS_VARIABLE, "value": text})
    return env


def setting_env(spec: PDClusterSpec, side: Role) -> list[dict[str, str]]:
    """Variables of the engine container for SGLang's plugin; none for SGLang's own backends."""
    if spec.transfer.backend is not Backend.PDCLUSTER:
        return []
    said = _settings(spec, side)
    values = (
        said.strategy,
        "1" if said.digest else None,
        None if said.staging_mib is None else str(said.staging_mib),
        None if said.quarantine_mib is None else str(said.quarantine_mib),
    )
    return [{"name": name, "value": value} for name, value in zip(PLUGIN_ENV, values, strict=True) if value is not None]
