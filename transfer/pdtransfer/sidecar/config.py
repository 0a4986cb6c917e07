"""Settings of the sidecar process: flags first, then environment (the pod's downward API)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdtransfer.contract.base import Role
from pdtransfer.contract.identity import OPERATOR_IDENTITY

SOCKET = "/run/pdtransfer/sidecar.sock"
CONTROL_PORT = 9440
HEALTH_PORT = 9441
ROSTER_BYTES = 128 << 20
"""Largest roster body taken: 512 peer cards of 100 KB leave half of it free."""
LINE_BYTES = 16 << 20
"""Largest line a rank may send: a card with its NIXL metadata is tens to hundreds of KB."""


@dataclass(frozen=True)
class Settings:
    """What one sidecar needs to know. Ports 0 mean any free one (tests). Times are seconds."""

    cluster_uid: str
    pod_uid: str
    role: Role
    pod_name: str = ""
    namespace: str = ""
    pod_ip: str = ""
    revision: str = ""
    socket: Path = Path(SOCKET)
    socket_mode: int = 0o660
    state_file: Path | None = None
    host: str = "0.0.0.0"
    health_host: str = "0.0.0.0"
    control_port: int = CONTROL_PORT
    health_port: int = HEALTH_PORT
    tls_dir: Path | None = None
    """None is --insecure: plain HTTP on loopback, anyone on this machine may write rosters."""
    client_identity: str = OPERATOR_IDENTITY
    wiring: bool = True
    linger: float = 5.0
    """After SIGTERM: how long to keep serving ranks that are still connected."""
    tls_interval: float = 10.0
    log_level: str = "INFO"
    max_roster_bytes: int = ROSTER_BYTES
    max_line_bytes: int = LINE_BYTES


def _parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="pdtransfer-sidecar",
        description="Gathers the cards of a pod's engine ranks and serves the control API to the operator.",
    )

    def opt(flag: str, var: str, default: str, text: str) -> None:
        p.add_argument(flag, default=env.get(var) or default, help=f"{text} [env {var}]")

    opt("--cluster-uid", "PDCLUSTER_UID", "", "UID of the PDCluster")
    opt("--role", "PDCLUSTER_ROLE", "", "prefill or decode")
    opt("--revision", "PDCLUSTER_REVISION", "", "revision hash of the pod")
    opt("--pod-uid", "POD_UID", "", "UID of this pod")
    opt("--pod-name", "POD_NAME", "", "name of this pod")
    opt("--namespace", "POD_NAMESPACE", "", "namespace of this pod")
    opt("--pod-ip", "POD_IP", "", "address of this pod")
    opt("--socket", "PDTRANSFER_SOCKET", SOCKET, "unix socket the ranks connect to")
    p.add_argument(
        "--socket-mode",
        default="0660",
        help="octal mode of the socket; engine and sidecar under different uids need a common group "
        "(pod securityContext fsGroup) or 0666",
    )
    p.add_argument("--state-file", default="", help="roster kept over a sidecar restart (default: beside the socket)")
    p.add_argument("--host", default="", help="address of the control API (default: any, of the pod's family)")
    p.add_argument("--control-port", type=int, default=CONTROL_PORT)
    p.add_argument("--health-host", default="", help="address of the health port")
    p.add_argument("--health-port", type=int, default=HEALTH_PORT, help="plain HTTP: probes and /metrics")
    opt("--tls-dir", "PDTRANSFER_TLS_DIR", "", "folder with ca.crt, tls.crt, tls.key")
    p.add_argument("--client-identity", default=OPERATOR_IDENTITY, help="who may use the control API")
    p.add_argument("--insecure", action="store_true", help="plain HTTP control API on 127.0.0.1 (tests)")
    opt("--wiring", "PDTRANSFER_WIRING", "on", "on, or off when the backend is not PDCluster")
    p.add_argument("--linger", type=float, default=5.0, help="seconds to wait for ranks after SIGTERM")
    opt("--log-level", "PDTRANSFER_LOG_LEVEL", "INFO", "logging level")
    return p


def parse(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags and environment; exits with a usage message (status 2) when they don't fit."""
    parser = _parser(os.environ if env is None else env)
    a = parser.parse_args(argv)
    for value, name in (
        (a.cluster_uid, "--cluster-uid or PDCLUSTER_UID"),
        (a.pod_uid, "--pod-uid or POD_UID"),
        (a.role, "--role or PDCLUSTER_ROLE"),
    ):
        if not value:
            parser.error(f"{name} is required")
    if a.role.lower() not in (Role.PREFILL, Role.DECODE):
        parser.error(f"--role is {a.role!r}; it must be prefill or decode")
    if a.wiring not in ("on", "off"):
        parser.error(f"--wiring is {a.wiring!r}; it must be on or off")
    if a.insecure == bool(a.tls_dir):
        parser.error("give either --tls-dir (mutual TLS) or --insecure (plain HTTP on loopback), not both")
    if str(a.log_level).upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        parser.error(f"--log-level is {a.log_level!r}; it must be DEBUG, INFO, WARNING or ERROR")
    try:
        mode = int(a.socket_mode, 8)
    except ValueError:
        parser.error(f"--socket-mode is {a.socket_mode!r}; it must be octal, such as 0660")
    socket = Path(a.socket)
    any_host = "::" if ":" in a.pod_ip else "0.0.0.0"
    return Settings(
        cluster_uid=a.cluster_uid,
        pod_uid=a.pod_uid,
        role=Role(a.role.lower()),
        pod_name=a.pod_name,
        namespace=a.namespace,
        pod_ip=a.pod_ip,
        revision=a.revision,
        socket=socket,
        socket_mode=mode,
        state_file=Path(a.state_file) if a.state_file else socket.with_suffix(".state.json"),
        host="127.0.0.1" if a.insecure else a.host or any_host,
        health_host=a.health_host or any_host,
        control_port=a.control_port,
        health_port=a.health_port,
        tls_dir=Path(a.tls_dir) if a.tls_dir else None,
        client_identity=a.client_identity,
        wiring=a.wiring == "on",
        linger=a.linger,
        log_level=a.log_level.upper(),
    )
