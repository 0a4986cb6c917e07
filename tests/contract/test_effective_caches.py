"""What SGLang makes of settings of its caches, by hand from the SGLang PD rules (E1, E5, E7, E9, its HiCache list)."""

from __future__ import annotations

from typing import Any

import pytest
from effective_kit import LLAMA, MLA, ROCM, V4, decode, prefill

from pdtransfer.contract.base import Role
from pdtransfer.contract.compat import Status, check
from pdtransfer.contract.facts import HostKVMode, RoleFacts


def test_decode_has_no_prefix_cache_but_by_its_own_flag() -> None:
    assert decode().facts.disable_radix_cache is True
    assert decode(decode_radix_cache=True, disable_radix_cache=True).facts.disable_radix_cache is False
    assert prefill().facts.disable_radix_cache is None
    told = check(RoleFacts(role=Role.PREFILL), RoleFacts(role=Role.DECODE, decode_radix_cache=False)).finding("E1")
    assert told and told.status is Status.PASS and "will be True" in told.message


@pytest.mark.parametrize(
    ("given", "backup"),
    [
        ({}, "host_pool"),
        ({"decode_radix_cache": True}, "cpu_tensor"),
        ({"decode_offload": True, "hicache_storage_backend": "file"}, "cpu_tensor"),
        ({"dcp_size": 2, "tensor_parallel": 2}, "cpu_tensor"),
        ({"priority_scheduling": True}, "cpu_tensor"),
        ({"priority_scheduling": True, "disable_priority_preemption": True}, "host_pool"),
        ({"chip": ROCM}, "cpu_tensor"),
        ({"geometry": MLA}, "cpu_tensor"),
        ({"geometry": V4}, "cpu_tensor"),
        ({"geometry": LLAMA.model_copy(update={"linear_layers": (0, 1)})}, "cpu_tensor"),
        ({"geometry": LLAMA.model_copy(update={"sliding_window_layers": (0, 1)})}, "host_pool"),
        ({"retraction_backup": "none"}, "none"),
        ({"host_kv": HostKVMode.HOST_RECEIVE}, "host_pool"),
        ({"geometry": None}, None),
    ],
)
def test_retraction_backup(given: dict[str, Any], backup: str | None) -> None:
    assert decode(**given).facts.retraction_backup == backup


def test_the_pool_for_retraction_holds_a_fifth_or_the_longest_request() -> None:
    """E5: max(0.2, one longest request): 8191 tokens, whole pages of 64: 8192 of 16384 are half."""
    assert decode(page_size=64, max_total_tokens=16384).facts.hicache_ratio == 0.5
    assert decode(page_size=64, max_total_tokens=81920).facts.hicache_ratio == 0.2
    assert decode(page_size=64).facts.hicache_ratio is None  # before the pool is known
    two = decode(page_size=64, max_total_tokens=16384, host_receive_threshold=0.5)
    assert two.facts.hicache_ratio == 1.0  # one is received while another is taken back


@pytest.mark.parametrize(
    ("given", "slots"),
    [
        ({}, 0),
        ({"max_running_requests": 32}, 64),
        ({"max_running_requests": 33}, 0),
        ({"max_running_requests": 64, "attention_data_parallel": 2, "tensor_parallel": 2}, 64),
        ({"max_running_requests": 1}, 2),
        ({"decode_extra_slots": 7}, 7),
    ],
)
def test_extra_slots_are_twice_a_small_batch(given: dict[str, Any], slots: int) -> None:
    assert decode(**given).facts.decode_extra_slots == slots
    assert prefill(**given).facts.decode_extra_slots == given.get("decode_extra_slots")


HICACHE = {"hierarchical_cache": True}


@pytest.mark.parametrize(
    ("given", "layout", "io"),
    [
        ({}, "page_first", "kernel"),
        ({"hicache_mem_layout": "page_first_direct"}, "page_first_direct", "direct"),
        ({"hicache_io_backend": "direct"}, "page_first_direct", "direct"),
        (
            {
                "hicache_mem_layout": "layer_first",
                "hicache_storage_backend": "mooncake",
                "hicache_io_backend": "direct",
            },
            "page_first_direct",
            "direct",
        ),
        ({"hicache_mem_layout": "layer_first", "hicache_storage_backend": "npu_memcache"}, "page_first", "kernel"),
        ({"hicache_mem_layout": "layer_first", "hicache_storage_backend": "file"}, "layer_first", "kernel"),
        ({"hicache_mem_layout": "page_first_direct", "unified_memory": True}, "page_first", "kernel"),
        (
            {"hicache_mem_layout": "layer_first", "hicache_storage_backend": "mooncake", "dcp_size": 2},
            "layer_first",
            "kernel",
        ),
    ],
)
def test_hicache_layout_and_io_fit_each_other_and_the_storage(given: dict[str, Any], layout: str, io: str) -> None:
    facts = prefill(**HICACHE, **given).facts
    assert (facts.hicache_mem_layout, facts.hicache_io_backend) == (layout, io)


def test_hicache_settings_are_left_alone_where_nothing_uses_them() -> None:
    odd = {"hicache_mem_layout": "page_first_direct", "hicache_io_backend": "kernel"}
    assert prefill(**odd).facts.hicache_io_backend == "kernel"
    assert decode(retraction_backup="none", **odd).facts.hicache_io_backend == "kernel"
    assert decode(**odd).facts.hicache_io_backend == "direct"  # decode may build a host pool


def test_host_receive_makes_the_host_pool_layer_first() -> None:
    assert decode(host_kv=HostKVMode.HOST_RECEIVE).facts.hicache_mem_layout == "layer_first"
    assert decode(host_receive_threshold=0.9).facts.hicache_mem_layout == "layer_first"
    assert decode(host_receive_threshold=1.0).facts.hicache_mem_layout == "page_first"


def test_hicache_size() -> None:
    buffered = {"hicache_host_memory_mode": "buffer_only", "hicache_storage_backend": "file"}
    assert prefill(**HICACHE).facts.hicache_ratio == 2.0
    assert prefill(**HICACHE, **buffered).facts.hicache_ratio == 1.2
    assert decode(**HICACHE, decode_radix_cache=True).facts.hicache_ratio == 2.0
    assert prefill(**HICACHE).facts.hicache_host_memory_fraction == 0.8
    for size in ({"hicache_ratio": 3.0}, {"hicache_size": 16}):
        assert prefill(**HICACHE, **size).facts.hicache_host_memory_fraction is None
    written = prefill(**HICACHE, **buffered, hicache_write_policy="write_back")
    assert written.facts.hicache_write_policy == "write_through"
    assert prefill(**HICACHE, hicache_write_policy="write_back").facts.hicache_write_policy == "write_back"


@pytest.mark.parametrize(
    ("given", "attempts"),
    [
        ({}, 3),
        ({"pipeline_parallel": 2}, 0),
        (HICACHE, 3),
        (HICACHE | {"hicache_write_policy": "write_through_selective"}, 0),
        (HICACHE | {"hicache_storage_backend": "file"}, 0),
        (HICACHE | {"hicache_storage_backend": "file", "hicache_host_memory_mode": "buffer_only"}, 3),
    ],
)
def test_optimistic_prefill_is_switched_off(given: dict[str, Any], attempts: int) -> None:
    assert prefill(optimistic_prefill=3, **given).facts.optimistic_prefill == attempts
