"""What the environment tells a rank: the same variables the operator sets in its pods, and a few for tuning.

Nothing set: a rank on its own. It names itself by its address and port, and its peers come from the bootstrap
exchange.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_type_hints

from pdtransfer.contract.nixl_params import parse_nixl_params
from pdtransfer.contract.nixl_plugins import DEFAULT, PARAMS_VARIABLE, PLUGIN_VARIABLE
from pdtransfer.session.api import EndpointConfig

MAX_MIB = 1 << 20
MAX_SECONDS = 86400
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class BadSetting(ValueError):
    """An environment variable makes no sense; the message begins with its name."""


@dataclass(frozen=True)
class Settings:
    """MiB are 2**20 bytes; None where the endpoint's own default holds."""

    cluster_uid: str = ""
    pod_uid: str = ""
    pod_name: str = ""
    host: str = ""
    """The pod's address; empty: SGLang finds one."""
    revision: str = ""
    socket: Path | None = None
    """The pod's sidecar: then rosters decide who the peers are."""
    tls_dir: Path | None = None
    strategy: Literal["auto", "sliced", "staged", "merge", "split"] = "auto"
    digest: bool = False
    staging_mib: int | None = None
    quarantine_mib: int | None = None
    transfer_seconds: float | None = None
    """From a request's first byte to its last."""
    net_devices: str | None = None
    """As UCX names them, in place of --disaggregation-ib-device."""
    nixl_plugin: str = DEFAULT
    """NIXL's backend under the transfer. It and its parameters are SGLang's own variables, which nixl reads too."""
    nixl_params: Mapping[str, str] = field(default_factory=dict)
    emulated_vram: bool = False
    """Device memory is host memory that is called so: tests without a GPU. Cards and logs say it."""

    @property
    def rostered(self) -> bool:
        """An operator says who the peers are."""
        return self.socket is not None


def read_settings(env: Mapping[str, str] | None = None) -> Settings:
    """The settings in an environment. Raises BadSetting."""
    env = os.environ if env is None else env
    strategy = env.get("PDTRANSFER_STRATEGY", "") or "auto"
    known = get_args(get_type_hints(EndpointConfig)["strategy"])
    if strategy not in known:
        raise BadSetting(f"PDTRANSFER_STRATEGY: {strategy!r} is unknown; it is one of {', '.join(known)}")
    parameters, problem = parse_nixl_params(env.get(PARAMS_VARIABLE, "").strip())
    if problem:
        raise BadSetting(f"{PARAMS_VARIABLE}: it {problem}")
    socket, tls = env.get("PDTRANSFER_SOCKET", ""), env.get("PDTRANSFER_TLS_DIR", "")
    return Settings(
        cluster_uid=env.get("PDCLUSTER_UID", ""),
        pod_uid=env.get("POD_UID", ""),
        pod_name=env.get("POD_NAME", ""),
        host=env.get("POD_IP", ""),
        revision=env.get("PDCLUSTER_REVISION", ""),
        socket=Path(socket) if socket else None,
        tls_dir=Path(tls) if tls else None,
        strategy=strategy,  # type: ignore[arg-type]
        digest=_flag(env, "PDTRANSFER_DIGEST"),
        staging_mib=_mib(env, "PDTRANSFER_STAGING_MIB"),
        quarantine_mib=_mib(env, "PDTRANSFER_QUARANTINE_MIB"),
        transfer_seconds=_seconds(env, "PDTRANSFER_TRANSFER_TIMEOUT"),
        net_devices=env.get("PDTRANSFER_NET_DEVICES", "").strip() or None,
        nixl_plugin=env.get(PLUGIN_VARIABLE, "").strip() or DEFAULT,
        nixl_params=parameters,
        emulated_vram=_flag(env, "PDTRANSFER_EMULATE_VRAM"),
    )


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").lower()
    if text not in (*TRUE, *FALSE):
        raise BadSetting(f"{name}: {text!r} is neither 1 nor 0")
    return text in TRUE


def _mib(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) > MAX_MIB:
        raise BadSetting(f"{name}: {text!r} is no whole number of MiB in 0 .. {MAX_MIB}")
    return int(text)


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    text = env.get(name, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise BadSetting(f"{name}: {text!r} is no number of seconds above 0, at most {MAX_SECONDS}")
    return seconds
