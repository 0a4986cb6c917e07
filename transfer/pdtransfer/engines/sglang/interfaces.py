"""Every interface of SGLang that this backend relies on, and whether the installed SGLang has it. Imports SGLang only
when it is asked.

Two lists: what the plugin needs at once (checked wherever it is loaded, cheap to import), and what the transfer
needs (checked where a scheduler or bootstrap server is made: it imports torch and more).
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import CodeType

TESTED = ("0.5.23",)
"""Versions that the suite ran with."""


@dataclass(frozen=True)
class Interface:
    """`name` in a module, dots for attributes of classes; `parameters` it must take (a function or class);
    `attributes` that its objects have."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_DISAGG = "sglang.srt.disaggregation"
_CONN = f"{_DISAGG}.common.conn"
_BASE = f"{_DISAGG}.base.conn"
_UTILS = f"{_DISAGG}.utils"
_RUNTIME = "sglang.srt.runtime_context"

# What their objects have.
_OF_ARGS = (
    "gpu_id", "kv_data_ptrs", "kv_data_lens", "kv_item_lens", "aux_data_ptrs", "aux_data_lens", "aux_item_lens",
    "page_size", "kv_cache_dtype_str", "prefill_start_layer", "kv_layer_ids", "num_draft_entries", "ib_device",
    "state_types", "state_data_ptrs", "state_data_lens", "state_item_lens", "state_layer_ids", "swa_kv_cache_layout",
    "mla_compression_ratios", "host_kv_data_ptrs", "host_kv_data_lens", "host_kv_item_lens", "host_state_data_ptrs",
    "host_state_data_lens", "host_state_item_lens",
)  # fmt: skip
_OF_MANAGER = (
    "kv_args", "server_args", "is_mla_backend", "is_hybrid_mla_backend", "server_socket", "_zmq_ctx", "local_ip",
    "bootstrap_port", "pp_rank", "pp_size", "attn_tp_rank", "attn_tp_size", "attn_dp_rank", "attn_dp_size",
    "attn_cp_rank", "attn_cp_size", "dcp_size", "system_dp_rank", "system_dp_size", "is_dummy_cp_rank",
    "enable_all_cp_ranks_for_transfer", "request_status", "failure_records", "_kv_replica_factor",
    "prefill_info_table", "connection_pool", "connection_lock", "addr_to_rooms_tracker", "heartbeat_failures",
    "heartbeat_interval", "max_failures",
)  # fmt: skip
_OF_SENDER = (
    "kv_mgr", "bootstrap_room", "conclude_state", "_owns_bootstrap_room", "_early_send_wait_event",
)  # fmt: skip
_OF_RECEIVER = (
    "kv_mgr", "bootstrap_room", "bootstrap_addr", "bootstrap_infos", "prefill_dp_rank", "conclude_state",
    "abort_notified", "init_time",
)  # fmt: skip
_OF_SERVER = (
    "app", "prefill_port_table", "_registered_count", "dp_size", "attn_cp_size", "attn_tp_size", "pp_size",
)  # fmt: skip

PLUGIN: tuple[Interface, ...] = (
    Interface("sglang.srt.arg_groups.choices", "DISAGG_TRANSFER_BACKEND_CHOICES"),
    Interface("sglang.srt.arg_groups.choices", "add_disagg_transfer_backend_choices"),
    Interface("sglang.srt.arg_groups.pd_disaggregation_hook", "handle_pd_disaggregation", ("server_args",)),
    Interface("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    Interface("sglang.srt.plugins.hook_registry", "HookType.AROUND"),
    Interface("sglang.srt.plugins.hook_registry", "HookType.AFTER"),
    Interface(_UTILS, "TransferBackend.NIXL"),
    Interface(_UTILS, "TransferBackend._value2member_map_"),
    Interface(_UTILS, "TransferBackend._member_map_"),
    Interface(_UTILS, "KVClassType.KVARGS"),
    Interface(_UTILS, "KVClassType.MANAGER"),
    Interface(_UTILS, "KVClassType.SENDER"),
    Interface(_UTILS, "KVClassType.RECEIVER"),
    Interface(_UTILS, "KVClassType.BOOTSTRAP_SERVER"),
    Interface(_UTILS, "get_kv_class", ("transfer_backend", "class_type")),
)

TRANSFER: tuple[Interface, ...] = (
    Interface(_BASE, "KVPoll.Failed"),
    Interface(_BASE, "KVPoll.Bootstrapping"),
    Interface(_BASE, "KVPoll.WaitingForInput"),
    Interface(_BASE, "KVPoll.Transferring"),
    Interface(_BASE, "KVPoll.Success"),
    Interface(_BASE, "KVTransferDestination.HOST"),
    Interface(_BASE, "KVTransferDestination.DEVICE"),
    Interface(_BASE, "KVArgs", attributes=_OF_ARGS),
    Interface(_CONN, "CommonKVManager", ("args", "disaggregation_mode", "server_args", "is_mla_backend")),
    Interface(_CONN, "CommonKVManager", attributes=_OF_MANAGER),
    Interface(_CONN, "CommonKVManager.register_to_bootstrap", ("self",)),
    Interface(_CONN, "CommonKVManager._register_topology_row", ("self", "url", "payload")),
    Interface(_CONN, "CommonKVManager.try_ensure_parallel_info", ("self", "bootstrap_addr")),
    Interface(_CONN, "CommonKVManager._handle_node_failure", ("self", "failed_bootstrap_addr")),
    Interface(_CONN, "CommonKVManager._start_heartbeat_checker_thread", ("self",)),
    Interface(_CONN, "CommonKVManager.update_status", ("self", "bootstrap_room", "status")),
    Interface(_CONN, "CommonKVManager.record_failure", ("self", "bootstrap_room", "failure_reason")),
    Interface(_CONN, "CommonKVManager.is_abort_release_safe", ("self", "bootstrap_room", "required_acks")),
    Interface(_CONN, "CommonKVManager.clear_deferred_abort_state", ("self", "bootstrap_room")),
    Interface(_CONN, "CommonKVManager.enable_deferred_decode_kv_release"),
    Interface(_CONN, "CommonKVManager.supports_deferred_decode_kv_release"),
    Interface(_CONN, "CommonKVManager.supports_host_destination"),
    Interface(_CONN, "CommonKVManager.reports_transfer_latency"),
    Interface(_CONN, "CommonKVSender", ("mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank")),
    Interface(_CONN, "CommonKVSender", attributes=_OF_SENDER),
    Interface(_CONN, "CommonKVSender.init", ("self", "num_kv_indices", "aux_index")),
    Interface(_CONN, "CommonKVSender.send", ("self", "kv_indices", "state_indices", "num_kv_tokens")),
    Interface(_CONN, "CommonKVSender.pop_decode_prefix_len", ("self",)),
    Interface(_CONN, "CommonKVSender.poll", ("self",)),
    Interface(_CONN, "CommonKVSender.poll_pp_consensus", ("self",)),
    Interface(_CONN, "CommonKVSender.abort", ("self",)),
    Interface(_CONN, "CommonKVSender.clear", ("self",)),
    Interface(_CONN, "CommonKVReceiver", ("mgr", "bootstrap_addr", "bootstrap_room")),
    Interface(_CONN, "CommonKVReceiver", attributes=_OF_RECEIVER),
    Interface(_CONN, "CommonKVReceiver.init", ("self", "prefill_dp_rank")),
    Interface(
        _CONN,
        "CommonKVReceiver.send_metadata",
        ("self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination", "device_kv_indices"),
    ),
    Interface(_CONN, "CommonKVReceiver._setup_bootstrap_infos", ("self",)),
    Interface(
        _CONN,
        "CommonKVReceiver._get_bootstrap_info_from_server",
        ("self", "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
    ),
    Interface(_CONN, "CommonKVReceiver._register_kv_args", ("self",)),
    Interface(_CONN, "CommonKVReceiver._connect", ("endpoint", "is_ipv6")),
    Interface(_CONN, "CommonKVReceiver.disconnect_endpoint", ("endpoint",)),
    Interface(_CONN, "CommonKVReceiver._socket_cache"),
    Interface(_CONN, "CommonKVReceiver._global_lock"),
    Interface(_CONN, "CommonKVReceiver.invalidate_cached_bootstrap_infos", ("self",)),
    Interface(_CONN, "CommonKVReceiver.ensure_abort_notified", ("self", "force_arm")),
    Interface(_CONN, "CommonKVReceiver.failure_exception", ("self",)),
    Interface(_CONN, "CommonKVReceiver.clear", ("self",)),
    Interface(_CONN, "CommonKVBootstrapServer", ("host", "port")),
    Interface(_CONN, "CommonKVBootstrapServer", attributes=_OF_SERVER),
    Interface(_CONN, "CommonKVBootstrapServer._setup_routes", ("self",)),
    Interface(_CONN, "CommonKVBootstrapServer._handle_route_put", ("self", "request")),
    Interface(_CONN, "CommonKVBootstrapServer._handle_health_check", ("self", "request")),
    Interface(_CONN, "CommonKVBootstrapServer._is_ready", ("self",)),
    Interface(_CONN, "CommonKVBootstrapServer._run_server", ("self",)),
    Interface(_CONN, "CommonKVBootstrapServer.close", ("self",)),
    Interface(_UTILS, "DisaggregationMode.PREFILL"),
    Interface("sglang.srt.utils.network", "NetworkAddress", ("host", "port")),
    Interface("sglang.srt.utils.network", "NetworkAddress.to_tcp", ("self",)),
    Interface("sglang.srt.environ", "envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"),
    Interface("sglang.srt.environ", "envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT"),
    Interface("sglang.srt.environ", "envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"),
    Interface("sglang.srt.environ", "envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"),
    Interface("sglang.srt.environ", "envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
    Interface(_RUNTIME, "get_parallel"),
    Interface(_RUNTIME, "get_serving"),
    Interface(_RUNTIME, "get_device"),
    Interface(_RUNTIME, "get_spec"),
    Interface(f"{_DISAGG}.decode", "DecodeTransferQueue.resolve_deferred_releases", ("self",)),
    Interface(f"{_DISAGG}.fake.conn", "FakeKVSender", ("mgr", "bootstrap_addr", "bootstrap_room")),
    Interface(f"{_DISAGG}.fake.conn", "FakeKVReceiver", ("mgr", "bootstrap_addr", "bootstrap_room")),
    Interface("sglang.srt.arg_groups.model_override_base", "model_config_of", ("server_args",)),
    Interface("sglang.srt.configs.model_config", "ModelConfig.get_total_num_kv_heads", ("self",)),
    Interface("sglang.srt.distributed.utils", "get_pp_indices", ("num_hidden_layers", "pp_rank", "pp_size")),
)


def missing(interfaces: Iterable[Interface]) -> list[str]:
    """What the installed SGLang lacks, one line each; empty when it has all."""
    return [f"{one}: {why}" for one in interfaces if (why := _lacks(one))]


def sglang_version() -> str:
    """Installed version, empty when its distribution is not known (a checkout)."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def _lacks(one: Interface) -> str:
    try:
        held: object = importlib.import_module(one.module)
    except ImportError as error:
        return f"the module can not be imported ({error})"
    for part in one.name.split("."):
        try:
            held = inspect.getattr_static(held, part)
        except AttributeError:
            return f"there is no {part}"
    if one.attributes:
        never = sorted(set(one.attributes) - _of_objects(held))
        return f"its objects have no {', '.join(never)}" if never else ""
    if not one.parameters:
        return ""
    if isinstance(held, staticmethod | classmethod):
        held = held.__func__
    try:
        taken = inspect.signature(held).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "its parameters can not be read"
    lost = [p for p in one.parameters if p not in taken]
    return f"it takes no {', '.join(lost)}" if lost else ""


def _of_objects(held: object) -> set[str]:
    """What the objects of a class have: names of the class, those it declares, those that its methods' code sets."""
    names = set(dir(held))
    for one in inspect.getmro(held) if inspect.isclass(held) else ():
        names |= set(vars(one).get("__annotations__", ()))
        codes: list[CodeType] = [f.__code__ for f in vars(one).values() if inspect.isfunction(f)]
        names |= {step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return names
