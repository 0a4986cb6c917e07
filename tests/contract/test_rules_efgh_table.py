"""Families E to H rule by rule: broken, fitting and unknown, per backend. Expected by hand from the SGLang PD rules."""

from __future__ import annotations

from typing import Any

import pytest
from rules_kit import ADP, PP, TP, Pair, decided, decode, prefill, sides, unknown

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, MemoryKind
from pdtransfer.contract.compat import RULES, Status, check
from pdtransfer.contract.facts import NO_LIMIT, HostKVMode
from pdtransfer.contract.geometry import ModelGeometry

HISPARSE, RECEIVE = HostKVMode.HISPARSE, HostKVMode.HOST_RECEIVE
CHUNK = "chunked_prefill_size"
DRAM = frozenset({MemoryKind.DRAM})
STAGED = {"staging_buffer": True}
STORED = {"hicache_storage_backend": "file"}
HICACHE = {"hierarchical_cache": True}
RADIX = {"decode_radix_cache": True}
SPARSE = {"host_kv": HISPARSE, "memory_kinds": DRAM}
UCX = '{"num_threads": "4"}'


# (rule, model, settings, PDCluster NIXL Mooncake): P pass, W warn, F fail, U unknown, - decided at another time
TWO_GPUS = '{"0": "mlx5_0", "1": "mlx5_1"}'
TABLE: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("E1", "gqa8", decode(disable_radix_cache=True, **RADIX), "WWW"),
    ("E2", "gqa8", unknown("decode_radix_cache", **decode(**HICACHE)), "UUU"),
    ("E3", "v4", decode(**RADIX), "FFF"),
    ("E3", "swa8", decode(**RADIX), "PPP"),
    ("E3", None, decode(**RADIX), "UUU"),
    ("E3", "gqa8", unknown("decode_radix_cache"), "UUU"),
    ("E4", "gqa8", {**STORED, **decode(decode_offload=True)}, "PPP"),
    ("E4", "gqa8", {"hicache_storage_backend": "", **decode(decode_offload=True)}, "FFF"),
    # The prompt's pages are looked for in the same store, which nobody checks.
    ("E4", "gqa8", decode(decode_offload=True, **STORED), "WWW"),
    ("E4", "swa8", {**STORED, **decode(decode_offload=True)}, "FFF"),
    ("E4", "linear", {**STORED, **decode(decode_offload=True)}, "FFF"),
    ("E4", "mla", {**STORED, **decode(decode_offload=True)}, "PPP"),
    # 36 layers x 2 x 8 heads x 64 x 2 bytes = 73728 a token; 100032 tokens with the spare page; 0.2 of that is 1.475e9.
    ("E5", "gqa8", decode(max_total_tokens=99968, host_memory=1_475_000_000), "WWW"),
    ("E5", "gqa8", decode(max_total_tokens=99968, host_memory=1_476_000_000), "PPP"),
    ("E5", "gqa8", decode(max_total_tokens=99968, host_memory=1, retraction_backup="cpu_tensor"), "PPP"),
    ("E5", "gqa8", decode(hicache_size=10, host_memory=9 * 10**9), "WWW"),
    ("E6", "gqa8", decode(retraction_backup="host_pool", dcp_size=2), "FFF"),
    ("E6", "gqa8", decode(retraction_backup="host_pool", priority_scheduling=True), "FFF"),
    (
        "E6",
        "gqa8",
        decode(retraction_backup="host_pool", priority_scheduling=True, disable_priority_preemption=True),
        "PPP",
    ),
    ("E6", "gqa8", decode(retraction_backup="cpu_tensor", priority_scheduling=True), "PPP"),
    ("E7", "gqa8", prefill(optimistic_prefill=2, hicache_write_policy="write_through_selective", **HICACHE), "WWW"),
    ("E7", "gqa8", prefill(optimistic_prefill=2, **HICACHE), "PPP"),
    ("E7", "gqa8", prefill(optimistic_prefill=2), "PPP"),
    ("E8", "gqa8", decode(**RADIX), "WWW"),
    ("E8", "gqa8", {}, "PPP"),
    ("E8", "gqa8", unknown("decode_radix_cache"), "UUU"),
    ("E9", "gqa8", decode(max_running_requests=16), "PPP"),
    ("E10", "gqa8", prefill(hicache_mem_layout="page_first_direct", hicache_io_backend="kernel", **HICACHE), "PPP"),
    ("E10", "gqa8", prefill(hicache_mem_layout="page_first_direct", **HICACHE, unified_memory=True), "WWW"),
    (
        "E10",
        "gqa8",
        prefill(hicache_mem_layout="layer_first", hicache_storage_backend="mooncake", **HICACHE),
        "WWW",
    ),
    ("E10", "gqa8", prefill(**HICACHE), "PPP"),
    ("E11", "gqa8", prefill(hicache_host_memory_mode="buffer_only", **HICACHE), "FFF"),
    ("E11", "gqa8", prefill(hicache_host_memory_mode="buffer_only", **HICACHE, **STORED), "PPP"),
    ("E11", "gqa8", decode(hicache_host_memory_mode="buffer_only", **HICACHE, **STORED, **RADIX), "FFF"),
    ("E11", "gqa8", prefill(hicache_host_memory_mode="buffer_only"), "PPP"),
    # Decode looks at it also without HiCache, before it settles its retraction backup.
    ("E11", "linear", decode(hicache_host_memory_mode="buffer_only"), "FFF"),
    ("E11", "linear", decode(hicache_host_memory_mode="buffer_only", retraction_backup="cpu_tensor"), "PPP"),
    ("E11", "gqa8", prefill(hicache_host_memory_fraction=0.0, **HICACHE), "FFF"),
    ("E11", "gqa8", prefill(disable_radix_cache=True, **HICACHE), "FFF"),
    ("E11", "gqa8", prefill(dcp_size=2, tensor_parallel=2, **HICACHE), "FFF"),
    ("E11", "mla", prefill(dcp_size=2, tensor_parallel=2, **HICACHE), "PPP"),
    (
        "E11",
        "mla",
        prefill(dcp_size=2, tensor_parallel=2, speculative_algorithm="EAGLE", **HICACHE),
        "FFF",
    ),
    (
        "E11",
        "mla",
        prefill(dcp_size=2, tensor_parallel=2, hicache_host_memory_mode="buffer_only", **HICACHE, **STORED),
        "FFF",
    ),
    ("E11", "gqa8", decode(host_kv=RECEIVE, hicache_storage_backend="mooncake"), "FFF"),
    ("E11", "gqa8", decode(host_kv=RECEIVE), "PPP"),
    ("F1", "gqa8", decode(host_kv=RECEIVE), "PPP"),
    ("F4", "v4", decode(**SPARSE), "FFP"),
    ("F4", "dsa", unknown("speculative_algorithm", **decode(**SPARSE)), "UUP"),
    ("F5", "v4", decode(**SPARSE), "PPP"),
    ("F5", "m3", decode(tensor_parallel=4, **SPARSE), "PPP"),
    ("F5", "m3", decode(tensor_parallel=2, **SPARSE), "FFF"),
    ("F5", "mla", decode(**SPARSE), "FFF"),
    ("F5", "dsa", decode(speculative_algorithm="EAGLE", speculative_eagle_topk=4, **SPARSE), "FFF"),
    ("F5", "dsa", decode(speculative_algorithm="EAGLE", speculative_eagle_topk=1, **SPARSE), "PPP"),
    ("F5", "dsa", decode(speculative_algorithm="EAGLE", speculative_adaptive=True, **SPARSE), "FFF"),
    ("F5", "dsa", {"kv_dtype": "fp8_e5m2", **decode(**SPARSE)}, "FFF"),
    ("F5", "dsa", {"kv_dtype": "fp8_e4m3", **decode(dsa_backend="trtllm", **SPARSE)}, "FFF"),
    ("F5", "dsa", {"kv_dtype": "fp8_e4m3", **decode(dsa_backend="flashmla_kv", **SPARSE)}, "PPP"),
    ("F5", "dsa", {"kv_dtype": "fp8_e4m3", **decode(dsa_backend="flashinfer_sparse_mla", **SPARSE)}, "PPP"),
    ("F5", "dsa", decode(dsa_backend="fa3", **SPARSE), "FFF"),
    ("F5", "dsa", {"accelerator": Accelerator.ROCM, **decode(dsa_backend="aiter", **SPARSE)}, "PPP"),
    ("F6", "dsa", decode(**SPARSE), "PPP"),
    ("F10", "gqa8", decode(host_kv=RECEIVE), "PPP"),
    ("F10", "swa8", decode(host_kv=RECEIVE), "PPP"),
    ("F10", "mla", decode(host_kv=RECEIVE), "FFF"),
    ("F10", "linear", decode(host_kv=RECEIVE), "FFF"),
    ("F10", "gqa8", decode(host_kv=RECEIVE, retraction_backup="cpu_tensor"), "FFF"),
    ("F10", "dsa", decode(host_receive_threshold=0.5, **SPARSE), "FFF"),
    ("F10", "gqa8", decode(host_receive_threshold=1.5), "FFF"),
    ("F10", None, decode(host_kv=RECEIVE), "UUU"),
    ("G1", "dsa", prefill(**STAGED), "FFF"),
    ("G2", "gqa8", prefill(chunked_prefill_size=100, **STAGED), "FFF"),
    ("G2", "gqa8", unknown("staging_buffer"), "UUU"),
    ("G3", "gqa8", {}, "PPP"),
    ("G4", "gqa8", STAGED, "PWW"),
    ("G4", "gqa8", {**STAGED, **sides({TP: 4}, {TP: 2})}, "PPP"),
    ("G4", "gqa8", {}, "PPP"),
    ("G5", "gqa8", sides({TP: 4, **STAGED}, {TP: 2}), "PWW"),
    ("G5", "gqa8", sides({TP: 4}, {TP: 2, **STAGED}), "PWW"),
    ("G5", "gqa8", {**STAGED, **sides({TP: 4}, {TP: 2})}, "PPP"),
    ("G5", "gqa8", prefill(**STAGED), "PPP"),
    # 8192 tokens x 36 layers x 2 x 4 heads x 64 x 2 bytes = 302 MB = 288 MiB for a decode rank of TP 2.
    ("G6", "gqa8", {**STAGED, **sides({TP: 4}, {TP: 2, "staging_pool_mb": 288})}, "PPP"),
    ("G6", "gqa8", {**STAGED, **sides({TP: 4}, {TP: 2, "staging_pool_mb": 287})}, "PFF"),
    # A chunk that SGLang chooses has at most 16384 tokens, twice those of the two rows above.
    ("G6", "gqa8", {**STAGED, **sides({TP: 4, CHUNK: None}, {TP: 2, "staging_pool_mb": 576})}, "PPP"),
    ("G6", "gqa8", {**STAGED, **sides({TP: 4, CHUNK: None}, {TP: 2, "staging_pool_mb": 575})}, "PUU"),
    # Eight ranks of four heads: each head is written twice, so a decode rank of two heads has room for four.
    ("G6", "gqa4", {**STAGED, **sides({TP: 8}, {TP: 2, "staging_pool_mb": 287})}, "PFF"),
    ("G6", "gqa4", {**STAGED, **sides({TP: 8}, {TP: 2, "staging_pool_mb": 288})}, "PPP"),
    ("G6", "gqa8", {**STAGED, **sides({TP: 4}, {TP: 4, "staging_pool_mb": 1})}, "PPP"),
    ("G6", None, {**STAGED, **sides({TP: 4}, {TP: 2})}, "PUU"),
    ("H3", "gqa8", {"ib_device": "mlx5_0"}, "PPP"),
    ("H3", "gqa8", {"ib_device": "mlx5_0, mlx5_1"}, "PPP"),
    ("H3", "gqa8", {"ib_device": "mlx5_0:1"}, "PFP"),
    ("H3", "gqa8", {"ib_device": "mlx5_0,"}, "PFP"),
    ("H3", "gqa8", {"ib_device": ","}, "PFF"),
    ("H3", "gqa8", {"ib_device": TWO_GPUS}, "PPP"),
    ("H3", "gqa8", {"ib_device": '{"1": "mlx5_1"}'}, "FFF"),
    ("H3", "gqa8", {"ib_device": '{"0": 5}'}, "FFF"),
    ("H3", "gqa8", {"ib_device": "{0: mlx5_0}"}, "FFF"),
    ("H3", "gqa8", {"ib_device": "{}"}, "FFF"),
    ("H3", "gqa8", {"ib_device": '{"\u00b2": "mlx5_0"}'}, "FFF"),
    ("H3", "gqa8", {"ib_device": '{"0":' * 100_000}, "FFF"),
    ("H3", "gqa8", {"ib_device": "/etc/devices.json"}, "PPP"),
    ("H3", "gqa8", {"ib_device": "mlx5_0", "nixl_backend": "LIBFABRIC"}, "WWP"),
    ("H3", "gqa8", {"ib_device": "mlx5_0", "ucx_net_devices": "eth0"}, "WWP"),
    ("H3", "gqa8", {"ib_device": "mlx5_0", "net_devices": "mlx5_1:1"}, "WPP"),
    ("H3", "gqa8", {"ib_device": "mlx5_0", "nixl_params": '{"device_list": "mlx5_1"}'}, "FFP"),
    ("H3", "gqa8", {"ib_device": "mlx5_0,mlx5_1", "nixl_params": '{"device_list": "mlx5_0, mlx5_1"}'}, "FPP"),
    ("H3", "gqa8", unknown("ib_device"), "UUU"),
    # A rank whose GPU the object lacks does not start; nothing falls back.
    ("H3", "gqa8", {TP: 2, "ib_device": TWO_GPUS}, "PPP"),
    ("H3", "gqa8", {TP: 2, **decode(ib_device='{"0": "mlx5_0"}')}, "FFF"),
    ("H3", "gqa8", {TP: 4, **prefill(ib_device=TWO_GPUS)}, "FFF"),
    ("H3", "gqa8", {TP: 4, **prefill(ib_device=TWO_GPUS, nodes=2)}, "PPP"),
    ("H3", "gqa8", {TP: 4, **prefill(ib_device='{"0": "mlx5_0"}', one_visible_device=True)}, "PPP"),
    ("H3", "gqa8", {TP: 4, **prefill(ib_device='{"0": "mlx5_0"}', use_ray=True)}, "PPP"),
    ("H3", "gqa8", prefill(ib_device=TWO_GPUS, base_gpu_id=2), "FFF"),
    ("H3", "gqa8", prefill(ib_device='{"2": "mlx5_2"}', base_gpu_id=2), "PPP"),
    ("H3", "gqa8", {TP: 2, **prefill(ib_device=TWO_GPUS, gpu_id_step=2)}, "FFF"),
    ("H3", "gqa8", {TP: 2, **prefill(ib_device='{"0": "mlx5_0", "2": "mlx5_2"}', gpu_id_step=2)}, "PPP"),
    ("H3", "gqa8", prefill(ib_device=TWO_GPUS, pipeline_parallel=3), "FFF"),
    ("H3", "gqa8", {TP: 2, **prefill(ib_device=TWO_GPUS, data_parallel=2)}, "FFF"),
    ("H3", "gqa8", {TP: 2, **prefill(ib_device=TWO_GPUS, data_parallel=2, dp_attention_flag=True)}, "PPP"),
    ("H3", "gqa8", {TP: 4, **prefill(ib_device=TWO_GPUS, mc_force_tcp="1")}, "FFP"),
    ("H3", "gqa8", unknown("base_gpu_id", ib_device=TWO_GPUS), "UUU"),
    ("H3", "gqa8", unknown("base_gpu_id", ib_device="mlx5_0"), "PPP"),
    ("H4", "gqa8", {"nixl_plugins": {"UCX", "POSIX"}}, "PPP"),
    ("H4", "gqa8", {"nixl_plugins": {"UCX"}, "nixl_backend": "LIBFABRIC"}, "FFP"),
    ("H4", "gqa8", {"nixl_plugins": set()}, "FFP"),
    # Every wheel of NIXL has UCX; what else an image has, somebody has to look up.
    ("H4", "gqa8", {}, "PPP"),
    ("H4", "gqa8", {"nixl_backend": "LIBFABRIC"}, "UUP"),
    ("H4", "gqa8", {"nixl_backend": "LIBFABRIC", **prefill(nixl_plugins={"UCX"})}, "FFP"),
    ("H4", "gqa8", {"nixl_backend": "LIBFABRIC", **decode(nixl_plugins={"LIBFABRIC"})}, "UUP"),
    ("H6", "gqa8", {"rust_server": True, "port": 30000, "bootstrap_port": 9000}, "PFF"),
    ("H6", "gqa8", sides({"rust_server": True, "port": 30000}, {"bootstrap_port": 30000}), "WPP"),
    ("H6", "gqa8", sides({"rust_server": True, "port": 30000}, {}), "PWW"),
    ("H7", "gqa8", prefill(route_registered=False), "FFF"),
    ("H7", "gqa8", prefill(route_registered=True), "PPP"),
    ("H7", "gqa8", {}, "---"),
    ("H8", "gqa8", decode(rank_host="127.0.0.1"), "FFF"),
    ("H8", "gqa8", prefill(rank_host="::1"), "FFF"),
    ("H8", "gqa8", {"rank_host": "10.0.0.7"}, "PPP"),
    ("H8", "gqa8", {"rank_host": "127.0.0.1"}, "WWW"),
    ("H8", "gqa8", unknown("rank_host"), "UUU"),
    ("H9", "gqa8", sides({TP: 2, ADP: 2}, {"force_query_prefill_dp_rank": True}), "FFF"),
    ("H9", "gqa8", sides({TP: 2, ADP: 2, "force_query_prefill_dp_rank": True}, {}), "WWW"),
    (
        "H9",
        "gqa8",
        {"force_query_prefill_dp_rank": True, **prefill(tensor_parallel=2, attention_data_parallel=2)},
        "PPP",
    ),
    ("H9", "gqa8", prefill(tensor_parallel=2, attention_data_parallel=2), "PPP"),
    (
        "H9",
        "gqa8",
        sides({TP: 2, ADP: 2, "load_balance_method": "round_robin"}, {"force_query_prefill_dp_rank": True}),
        "PPP",
    ),
    ("H9", "gqa8", decode(force_query_prefill_dp_rank=True), "PPP"),
    ("H10", "gqa8", {"sampling_mask": True, **decode(sampling_mask_max_tokens=64)}, "FFF"),
    ("H10", "gqa8", {"sampling_mask": True, "sampling_mask_max_tokens": 64}, "PPP"),
    ("H10", "gqa8", decode(sampling_mask_max_tokens=64), "PPP"),
    ("H10", "gqa8", unknown("sampling_mask"), "UUU"),
    ("H11", "gqa8", prefill(kv_checksum=True), "FWW"),
    ("H11", "gqa8", decode(kv_checksum=True), "FWW"),
    ("H11", "gqa8", {"kv_checksum": True}, "PPP"),
    ("H11", "gqa8", {"kv_checksum": True, **sides({TP: 4}, {TP: 2})}, "WWW"),
    ("H11", "mla", {"kv_checksum": True, **sides({PP: 2}, {})}, "WWW"),
    ("H11", "gqa8", sides({TP: 4}, {TP: 2}), "PPP"),
    ("H12", "gqa8", {"max_top_logprobs": 20}, "PPP"),
    ("H12", "gqa8", {"max_top_logprobs": 128}, "PPP"),
    ("H12", "gqa8", {"max_top_logprobs": 129}, "WWW"),
    ("H12", "gqa8", {"max_top_logprobs": NO_LIMIT}, "WWW"),
    ("H12", "gqa8", {"max_top_logprobs": None}, "UUU"),
    ("H13", "gqa8", {"mooncake_tcp": True, "ib_device": "mlx5_0"}, "WWW"),
    ("H13", "gqa8", {"mooncake_tcp": True}, "PPP"),
    ("H13", "gqa8", prefill(mooncake_tcp=True), "PPW"),
    ("H13", "gqa8", decode(mooncake_tcp=True), "PPW"),
    ("H14", "gqa8", {"nixl_params": "{num_threads: 4}"}, "FFP"),
    ("H14", "gqa8", {"nixl_params": '{"num_threads": 4}'}, "FFP"),
    ("H14", "gqa8", {"nixl_params": '["a"]'}, "FFP"),
    ("H14", "gqa8", {"nixl_params": UCX}, "PPP"),
    ("H14", "gqa8", prefill(nixl_params=UCX), "PPP"),
    ("H14", "gqa8", prefill(nixl_params='{"ucx_error_handling_mode": "none"}'), "FWP"),
    ("H14", "gqa8", prefill(nixl_params='{"device_list": "mlx5_0"}'), "PPP"),
    ("H14", "gqa8", prefill(nixl_params='{"num_workers": "2"}'), "WWP"),
    ("H14", "gqa8", {"nixl_params": '{"num_workers": "2"}'}, "PPP"),
    ("H14", "gqa8", {"nixl_params": '{"workers": "2"}'}, "FWP"),
    ("H14", "gqa8", {"nixl_backend": "POSIX"}, "FFP"),
    ("H14", "gqa8", decode(nixl_backend="OBJ"), "FFP"),
    ("H14", "gqa8", unknown("nixl_params", **decode(nixl_backend="OBJ")), "UFP"),
    ("H14", "gqa8", {"nixl_backend": "POSIX", "observed": True}, "PPP"),
    ("H14", "gqa8", {"nixl_backend": "OF_A_LATER_NIXL"}, "FPP"),
    ("H14", "gqa8", {"nixl_backend": "LIBFABRIC", "nixl_params": '{"num_threads": "2"}'}, "PPP"),
    ("H14", "gqa8", {"nixl_params": '{"of_a_later_nixl": "2"}', "observed": True}, "PWP"),
]


@pytest.mark.parametrize(("rule", "model", "settings", "expected"), TABLE)
def test_rule_e_to_h_per_backend(
    pair: Pair, rule: str, model: str | None, settings: dict[str, Any], expected: str
) -> None:
    assert "".join(decided(pair, rule, model, settings, b, rewritten=True)[0] for b in Backend) == expected


# (rule, model, settings, backend, the table's outcome word)
OUTCOMES: list[tuple[str, str, dict[str, Any], Backend, str]] = [
    ("E1", "gqa8", decode(disable_radix_cache=True, **RADIX), Backend.NIXL, "NORM"),
    ("E2", "gqa8", decode(**HICACHE), Backend.NIXL, "START"),
    ("E3", "dsa", decode(**RADIX, **SPARSE), Backend.MOONCAKE, "START"),
    ("E4", "gqa8", decode(decode_offload=True), Backend.NIXL, "START"),
    ("E6", "linear", decode(retraction_backup="host_pool"), Backend.NIXL, "START"),
    ("E7", "gqa8", prefill(optimistic_prefill=1, pipeline_parallel=2), Backend.NIXL, "NORM"),
    ("E8", "gqa8", decode(**RADIX), Backend.NIXL, "WARN"),
    (
        "E10",
        "gqa8",
        prefill(hicache_mem_layout="layer_first", hicache_storage_backend="mooncake", **HICACHE),
        Backend.NIXL,
        "NORM",
    ),
    ("F1", "gqa8", prefill(host_kv=RECEIVE), Backend.NIXL, "START"),
    ("F2", "gqa8", decode(host_kv=RECEIVE), Backend.MOONCAKE, "START"),
    ("F3", "gqa8", sides({TP: 4}, {TP: 2, "memory_kinds": DRAM}), Backend.NIXL, "PDEAD"),
    ("F4", "v4", decode(**SPARSE), Backend.PDCLUSTER, "DCRASH"),
    ("F5", "gqa8", decode(**SPARSE), Backend.NIXL, "START"),
    ("F6", "dsa", prefill(**SPARSE), Backend.NIXL, "WRONG"),
    ("G1", "mla", STAGED, Backend.NIXL, "START"),
    ("G2", "gqa8", prefill(chunked_prefill_size=-1, **STAGED), Backend.MOONCAKE, "START"),
    ("G3", "gqa8", STAGED, Backend.PDCLUSTER, "START"),
    ("G6", "gqa8", {**STAGED, **sides({TP: 4}, {TP: 2, "staging_pool_mb": 1})}, Backend.NIXL, "REQ"),
    ("H2", "gqa8", decode(nixl_backend="LIBFABRIC"), Backend.NIXL, "PDEAD"),
    ("H3", "gqa8", {"ib_device": "mlx5_0:1"}, Backend.NIXL, "START"),
    ("H3", "gqa8", {"ib_device": "mlx5_0", "ucx_net_devices": "lo"}, Backend.NIXL, "WARN"),
    ("H4", "gqa8", {"nixl_plugins": set()}, Backend.NIXL, "START"),
    ("H5", "gqa8", prefill(host="127.0.0.1"), Backend.NIXL, "REQ"),
    ("H7", "gqa8", prefill(route_registered=False), Backend.NIXL, "HANG"),
    ("H7", "gqa8", prefill(route_registered=False), Backend.MOONCAKE, "HANG"),
    # The plugin's ranks try on for 300 s and end then; rooms fail meanwhile (tests/sglang/test_plugin_registration.py).
    ("H7", "gqa8", prefill(route_registered=False), Backend.PDCLUSTER, "REQ"),
    ("H10", "gqa8", decode(sampling_mask=True), Backend.NIXL, "HANG"),
    ("H10", "gqa8", decode(sampling_mask=True), Backend.PDCLUSTER, "REQ"),
    ("H13", "gqa8", {"mooncake_tcp": True, "ib_device": "mlx5_0"}, Backend.MOONCAKE, "NORM"),
    ("H14", "gqa8", {"nixl_params": "[]"}, Backend.NIXL, "START"),
    ("H14", "gqa8", {"nixl_backend": "POSIX"}, Backend.NIXL, "START"),
]


@pytest.mark.parametrize(("rule", "model", "settings", "backend", "outcome"), OUTCOMES)
def test_outcome_e_to_h_is_the_tables_word(
    pair: Pair, rule: str, model: str, settings: dict[str, Any], backend: Backend, outcome: str
) -> None:
    assert decided(pair, rule, model, settings, backend, rewritten=True)[1] == outcome


def test_messages_say_how_much_memory_is_needed(pair: Pair) -> None:
    p, d = pair(decode={"max_total_tokens": 99968, "host_memory": 10**9, TP: 1})
    finding = check(p, d).finding("E5")
    # 100032 tokens x 73728 bytes x 0.2 = 1475031859 bytes
    assert finding and "1 ranks take 1.4 GiB" in finding.message and "0.9 GiB" in finding.message
    staged = check(*pair(**STAGED, **sides({TP: 4}, {TP: 2, "staging_pool_mb": 100}), backend=Backend.NIXL))
    ring = staged.finding("G6")
    assert ring and "8192 tokens is 288 MiB" in ring.message and "100 MiB" in ring.message
    alone = check(*pair(decode={TP: 4, "ib_device": TWO_GPUS})).finding("H3")
    assert alone and alone.status is Status.FAIL and "decode has --disaggregation-ib-device" in alone.message
    assert "no devices for GPU 2" in alone.message


def test_what_nobody_told_is_named_with_what_to_do(pair: Pair) -> None:
    untold = check(*pair(max_top_logprobs=None, nixl_backend="LIBFABRIC"), Backend.NIXL)
    for rule, fact, todo in (
        ("H12", "max_top_logprobs", "in front of the engines"),
        ("H4", "nixl_plugins", "get_plugin_list()"),
    ):
        finding = untold.finding(rule)
        assert finding and finding.needs == f"prefill.{fact}" and todo in finding.action
    unlimited = check(*pair(max_top_logprobs=NO_LIMIT)).finding("H12")
    assert unlimited and unlimited.message.startswith("nothing limits top_logprobs. One that asks for more than 128")


def test_hisparse_knows_the_families_by_architecture_and_by_type(pair: Pair) -> None:
    """SGLang goes by architectures; a spec that states only a type is read by it."""
    for shape in (
        {"architecture": "MiniMaxM3SparseForConditionalGeneration", "model_type": "minimax_m2"},
        {"model_type": "minimax_m3_vl"},
        {"architecture": "DeepseekV4ForCausalLM"},
        {"model_type": "deepseek_v4"},
    ):
        geometry = ModelGeometry(attention="GQA", layers=4, kv_heads=1, head_dim=64, **shape)
        finding = check(*pair(None, geometry=geometry, decode=SPARSE), Backend.MOONCAKE).finding("F5")
        assert finding and finding.status is Status.PASS, shape
    other = ModelGeometry(attention="GQA", layers=4, kv_heads=1, head_dim=64, architecture="LlamaForCausalLM")
    finding = check(*pair(None, geometry=other, decode=SPARSE), Backend.MOONCAKE).finding("F5")
    assert finding and finding.status is Status.FAIL and "LlamaForCausalLM" in finding.message


def test_decodes_radix_cache_excludes_models_whose_sliding_layers_have_a_shape_of_their_own(pair: Pair) -> None:
    for architecture, status in (("Gemma4ForCausalLM", Status.FAIL), ("Gemma3ForCausalLM", Status.PASS)):
        geometry = ModelGeometry(attention="GQA", layers=4, kv_heads=1, head_dim=64, architecture=architecture)
        finding = check(*pair(None, geometry=geometry, decode=RADIX)).finding("E3")
        assert finding and finding.status is status, architecture


def test_every_rule_of_e_to_h_is_there() -> None:
    """The ids of the table, with those that this project added (F7-F10 for cards and host receive, E10 and E11 for
    the table's list of HiCache rewrites)."""
    found = [r.id for r in RULES if r.family in "EFGH"]
    assert sorted(found) == sorted(
        [f"E{n}" for n in range(1, 12)]
        + [f"F{n}" for n in range(1, 11)]
        + [f"G{n}" for n in range(1, 7)]
        + [f"H{n}" for n in range(1, 15)]
    )
