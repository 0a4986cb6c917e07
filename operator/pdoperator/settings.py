"""Settings of the operator process: flags, then environment, then defaults."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdoperator.domain.settings import DecideSettings


@dataclass(frozen=True)
class OperatorSettings:
    """`watch_namespaces` empty means all. `health_address` serves /healthz, `metrics_port` 0 serves none."""

    operator_namespace: str = "pdcluster-system"
    pod_name: str = "pdcluster-operator"
    watch_namespaces: tuple[str, ...] = ()
    transfer_image: str = DecideSettings.transfer_image
    router_image: str = DecideSettings.router_image
    image_pull_policy: str = DecideSettings.image_pull_policy
    network_policy: bool = True
    disruption_budgets: bool = True
    health_address: str = "0.0.0.0:8080"
    metrics_port: int = 8081
    log_level: str = "INFO"
    log_format: str = "plain"
    kubeconfig: str = ""

    def decide_settings(self) -> DecideSettings:
        """What decide() gets of these."""
        return DecideSettings(
            transfer_image=self.transfer_image,
            router_image=self.router_image,
            operator_namespace=self.operator_namespace,
            image_pull_policy=self.image_pull_policy,
            network_policy=self.network_policy,
            disruption_budgets=self.disruption_budgets,
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(w for w in text.replace(",", " ").split() if w)


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def parse(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> OperatorSettings:
    """Settings of a command line. Exits with a usage message on nonsense."""
    env = os.environ if env is None else env
    default = OperatorSettings()
    parser = argparse.ArgumentParser(prog="pdcluster-operator", description="Kubernetes operator for PDClusters.")

    def text(flag: str, variable: str, fallback: str, what: str) -> None:
        parser.add_argument(flag, default=env.get(variable) or fallback, help=f"{what} [env {variable}]")

    text("--operator-namespace", "OPERATOR_NAMESPACE", default.operator_namespace, "namespace of Lease and CA")
    text("--pod-name", "OPERATOR_POD_NAME", socket.gethostname() or default.pod_name, "name in the Lease")
    text("--transfer-image", "DEFAULT_TRANSFER_IMAGE", default.transfer_image, "sidecar image unless a spec names one")
    text("--router-image", "DEFAULT_ROUTER_IMAGE", default.router_image, "router image unless a spec names one")
    text("--image-pull-policy", "IMAGE_PULL_POLICY", default.image_pull_policy, "of the containers the operator adds")
    text("--health-address", "HEALTH_ADDRESS", default.health_address, "host:port of /healthz")
    text("--log-level", "LOG_LEVEL", default.log_level, "DEBUG, INFO, WARNING or ERROR")
    text("--log-format", "LOG_FORMAT", default.log_format, "plain (key=value) or json")
    text("--kubeconfig", "KUBECONFIG", "", "outside a cluster; empty: the pod's service account")
    parser.add_argument(
        "--namespace", action="append", default=None,
        help="namespace to watch, may be given several times; none: all [env WATCH_NAMESPACES]",
    )  # fmt: skip
    parser.add_argument("--metrics-port", type=int, default=int(env.get("METRICS_PORT") or default.metrics_port))
    for flag, variable in (("--network-policy", "NETWORK_POLICY"), ("--disruption-budgets", "DISRUPTION_BUDGETS")):
        parser.add_argument(flag, type=_flag, default=env.get(variable) or "true", help=f"[env {variable}]")
    args = parser.parse_args(argv)
    watched = tuple(args.namespace) if args.namespace else _words(env.get("WATCH_NAMESPACES", ""))
    if args.log_format not in ("plain", "json"):
        parser.error(f"--log-format is plain or json, not {args.log_format!r}")
    return OperatorSettings(
        operator_namespace=args.operator_namespace,
        pod_name=args.pod_name,
        watch_namespaces=tuple(sorted(set(watched))),
        transfer_image=args.transfer_image,
        router_image=args.router_image,
        image_pull_policy=args.image_pull_policy,
        network_policy=args.network_policy,
        disruption_budgets=args.disruption_budgets,
        health_address=args.health_address,
        metrics_port=args.metrics_port,
        log_level=args.log_level.upper(),
        log_format=args.log_format,
        kubeconfig=args.kubeconfig,
    )
