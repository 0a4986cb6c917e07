"""Command line of the Reference engine: SGLang's names where SGLang has the flag."""

from __future__ import annotations

import argparse
import os
import secrets
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdtransfer.contract.nixl_params import parse_nixl_params
from pdtransfer.contract.nixl_plugins import DEFAULT, PARAMS_VARIABLE, PLUGIN_VARIABLE
from pdtransfer.engines.reference.problems import SetupError

MODES = ("null", "prefill", "decode")
BACKENDS = ("pdcluster", "nixl", "mooncake")
TRANSFER_SLACK_S = 30.0
KV_MEMORY = ("dram", "vram-emulated", "mixed")
KV_STRATEGIES = ("auto", "sliced", "staged", "merge", "split")
MAX_MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """Checked flags. Sizes are tokens, times seconds."""

    model_path: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 30000
    tp_size: int = 1
    page_size: int = 16
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_total_tokens: int = 4096
    chunked_prefill_size: int = 256
    max_running_requests: int = 8
    mode: str = "null"
    backend: str = "pdcluster"
    bootstrap_port: int = 8998
    kv_memory: str = "dram"
    sidecar_socket: Path | None = None
    peers_dir: Path | None = None
    advertise_host: str = "127.0.0.1"
    tls_dir: Path | None = None
    incarnation: str = ""
    seed: int = 0
    model_revision: str = ""
    cluster_uid: str = ""
    pod_uid: str = ""
    pod_name: str = ""
    pod_revision: str = ""
    net_devices: str | None = None
    nixl_plugin: str = DEFAULT
    """It and its parameters are told by variables, as to SGLang."""
    nixl_params: tuple[tuple[str, str], ...] = ()
    kv_strategy: Literal["auto", "sliced", "staged", "merge", "split"] = "auto"
    kv_digest: bool = False
    kv_staging_mib: int | None = None
    """None: as much as the pool, at most the transfer module's default."""
    kv_quarantine_mib: int | None = None
    waiting_timeout: float = 30.0
    kv_timeout: float = 60.0
    queue_timeout: float = 60.0
    drain_timeout: float = 20.0
    load_timeout: float = 600.0
    step_timeout: float = 300.0

    @property
    def introduces(self) -> bool:
        """Peers meet through the prefill's bootstrap port, request by request, as with SGLang's own
        backends (which are emulated then): there is no roster."""
        return self.disaggregated and self.backend != "pdcluster" and self.peers_dir is None

    @property
    def transfer_timeout(self) -> float:
        """The leader's own bound on a transfer: above all deadlines of the endpoints, which come first."""
        return self.waiting_timeout + self.kv_timeout + TRANSFER_SLACK_S

    @property
    def disaggregated(self) -> bool:
        """True for a prefill or decode engine."""
        return self.mode != "null"


def parse_options(argv: list[str] | None = None) -> Options:
    """Flags to Options; SetupError says which flag is wrong and what it takes."""
    options = _options(_parser().parse_args(argv))
    for flag, value in (
        ("--tp-size", options.tp_size),
        ("--page-size", options.page_size),
        ("--max-total-tokens", options.max_total_tokens),
        ("--chunked-prefill-size", options.chunked_prefill_size),
        ("--max-running-requests", options.max_running_requests),
    ):
        if value <= 0:
            raise SetupError(f"{flag} must be at least 1, not {value}")
    for flag, mib in (
        ("--kv-staging-mib", options.kv_staging_mib),
        ("--kv-quarantine-mib", options.kv_quarantine_mib),
    ):
        if mib is not None and not 0 <= mib <= MAX_MIB:
            raise SetupError(f"{flag} must be in 0 .. {MAX_MIB}, not {mib}")
    if options.mode != "decode" and (options.kv_strategy != "auto" or options.kv_digest):
        # They would be without effect: decode asks, prefill obeys.
        raise SetupError("--kv-strategy and --kv-digest are decode's: set them with --disaggregation-mode decode")
    if options.chunked_prefill_size % options.page_size:
        raise SetupError(
            f"--chunked-prefill-size {options.chunked_prefill_size} is not a multiple of "
            f"--page-size {options.page_size}: a chunk must end where a page ends"
        )
    if options.max_total_tokens < options.page_size:
        raise SetupError(f"--max-total-tokens {options.max_total_tokens} is less than one page")
    return options


def _nixl_params(text: str) -> tuple[tuple[str, str], ...]:
    parameters, problem = parse_nixl_params(text)
    if problem:
        raise SetupError(f"{PARAMS_VARIABLE} {problem}")
    return tuple(sorted(parameters.items()))


def _options(args: argparse.Namespace) -> Options:
    return Options(
        model_path=args.model_path,
        served_model_name=args.served_model_name or str(args.model_path),
        host=args.host,
        port=args.port,
        tp_size=args.tp_size,
        page_size=args.page_size,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        max_total_tokens=args.max_total_tokens,
        chunked_prefill_size=args.chunked_prefill_size,
        max_running_requests=args.max_running_requests,
        mode=args.disaggregation_mode,
        backend=args.disaggregation_transfer_backend,
        bootstrap_port=args.disaggregation_bootstrap_port,
        kv_memory=args.kv_memory_kind,
        sidecar_socket=args.sidecar_socket,
        peers_dir=args.peers_file,
        advertise_host=args.advertise_host,
        tls_dir=args.tls_dir,
        incarnation=args.incarnation or secrets.token_hex(8),
        seed=args.seed,
        model_revision=args.model_revision,
        cluster_uid=args.cluster_uid,
        pod_uid=args.pod_uid or str(uuid.uuid4()),
        pod_name=args.pod_name,
        pod_revision=args.pod_revision,
        net_devices=args.net_devices,
        nixl_plugin=os.environ.get(PLUGIN_VARIABLE, "").strip() or DEFAULT,
        nixl_params=_nixl_params(os.environ.get(PARAMS_VARIABLE, "").strip()),
        kv_strategy=args.kv_strategy,
        kv_digest=args.kv_digest,
        kv_staging_mib=args.kv_staging_mib,
        kv_quarantine_mib=args.kv_quarantine_mib,
        waiting_timeout=args.kv_waiting_timeout,
        kv_timeout=args.kv_transfer_timeout,
        queue_timeout=args.queue_timeout,
        drain_timeout=args.drain_timeout,
        load_timeout=args.load_timeout,
        step_timeout=args.step_timeout,
    )


def _parser() -> argparse.ArgumentParser:
    env = os.environ.get
    parser = argparse.ArgumentParser(
        prog="pdtransfer-reference",
        description="Serve a Llama checkpoint with the Reference engine (small, real, CPU).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="Hugging Face checkpoint folder")
    add("--served-model-name", default="")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--tp-size", "--tensor-parallel-size", type=int, default=1)
    add("--page-size", type=int, default=16, help="tokens per KV page")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--kv-cache-dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--max-total-tokens", type=int, default=4096, help="tokens the KV pool holds")
    add("--chunked-prefill-size", type=int, default=256, help="prompt tokens per step")
    add("--max-running-requests", type=int, default=8)
    add("--disaggregation-mode", choices=MODES, default="null")
    add(
        "--disaggregation-transfer-backend",
        choices=BACKENDS,
        default="pdcluster",
        help="nixl, mooncake: hold to the limits of SGLang's own backends (emulated, and labelled so)",
    )
    add("--disaggregation-bootstrap-port", type=int, default=8998)
    add("--kv-memory-kind", choices=KV_MEMORY, default="dram")
    add("--sidecar-socket", type=Path, help="unix socket of the pod's sidecar")
    add("--peers-file", "--peers-dir", type=Path, help="folder of rank cards, instead of a sidecar")
    add("--advertise-host", default=env("POD_IP", "127.0.0.1"), help="address that peers reach this pod at")
    add("--tls-dir", type=Path, help="folder with ca.crt, tls.crt and tls.key for the ranks' control channel")
    add("--incarnation", default="", help="default: new and random at each start")
    add("--seed", type=int, default=0)
    add("--model-revision", default="")
    add("--cluster-uid", default=env("PDCLUSTER_UID", ""))
    add("--pod-uid", default=env("POD_UID", ""))
    add("--pod-name", default=env("POD_NAME", ""))
    add("--pod-revision", default=env("PDCLUSTER_REVISION", ""))
    add("--net-devices", default=env("UCX_NET_DEVICES"), help="network devices for NIXL's UCX")
    add(
        "--kv-strategy",
        choices=KV_STRATEGIES,
        default="auto",
        help="decode: how KV slices of unequal TP travel; auto takes the cheapest for each request",
    )
    add(
        "--kv-digest",
        action="store_true",
        help="decode: check a digest of each request's bytes; costs about 1 s per GB",
    )
    add(
        "--kv-staging-mib",
        type=int,
        help="registered memory beside the pool for slices of unequal TP, MiB a rank; 0: none, they are written "
        "in place; default: as much as the pool, at most 64",
    )
    add(
        "--kv-quarantine-mib",
        type=int,
        help="decode: MiB of KV that late writes may keep before the rank takes a new NIXL agent at once; "
        "default: an eighth of the pool",
    )
    add("--queue-timeout", type=float, default=60.0, help="seconds a request may wait for pages")
    add("--kv-waiting-timeout", type=float, default=30.0, help="seconds one side waits for the other")
    add("--kv-transfer-timeout", type=float, default=60.0, help="seconds from a request's first byte to its last")
    add("--drain-timeout", type=float, default=20.0, help="seconds that SIGTERM leaves to running requests")
    add("--load-timeout", type=float, default=600.0, help="seconds the ranks may take to load")
    add("--step-timeout", type=float, default=300.0, help="seconds after which a step means that a rank is stuck")
    return parser
