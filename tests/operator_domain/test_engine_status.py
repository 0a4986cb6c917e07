"""Effective settings of the engines in the status: worked out from the spec, or read back from running ranks."""

from __future__ import annotations

from typing import Any

from domain_makers import make_cards, quickstart
from domain_world import World

from pdoperator.api.spec import PDClusterSpec
from pdoperator.api.status import RoleEngineStatus
from pdoperator.domain.engine_status import engine_status
from pdtransfer.contract.base import EngineType, MemoryKind, Role
from pdtransfer.contract.card import RankCard, StagingArena

SGLANG = {"type": "SGLang", "image": "sg:1", "version": "0.5.23"}
DSA = {
    "attention": "DSA", "layers": 4, "kvHeads": 1, "headDim": 576, "kvLoraRank": 512, "qkRopeHeadDim": 64,
    "indexHeadDim": 128, "dtype": "bfloat16",
}  # fmt: skip


def spec_of(**changes: Any) -> PDClusterSpec:
    return PDClusterSpec.model_validate(quickstart(engine=SGLANG, **changes))


def status_of(spec: PDClusterSpec, role: Role, cards: tuple[RankCard, ...] = ()) -> RoleEngineStatus:
    found = engine_status(spec, role, cards)
    assert found is not None
    return found


def running(page: int, settings: dict[str, Any]) -> tuple[RankCard, ...]:
    """Cards of an SGLang decode at TP 1 whose page size and resolved settings are these."""
    return tuple(
        card.model_copy(
            update={
                "engine": card.engine.model_copy(
                    update={"type": EngineType.SGLANG, "settings": tuple(sorted(settings.items()))}
                )
            }
        )
        for card in make_cards("u", Role.DECODE, "i", 1, page=page)
    )


def test_running_ranks_tell_their_page_dtype_and_memory() -> None:
    world = World(quickstart())
    world.run()
    told = world.status["prefill"]["engine"]
    assert told["settings"] == {
        "attentionDataParallelSize": "1",
        "attentionTensorParallelSize": "2",
        "kvCacheDtype": "float32",
        "kvMemory": "DRAM",
        "maxTotalTokens": "128",
        "nixlPlugin": "UCX",
        "pageSize": "16",
    }
    assert sorted(told["observed"]) == sorted(told["settings"])
    assert "rewrites" not in told
    assert world.status["decode"]["engine"]["settings"]["attentionTensorParallelSize"] == "1"


def test_before_a_pod_exists_the_settings_are_worked_out_and_nothing_is_observed() -> None:
    spec = spec_of(model__geometry=DSA, kvCache={"pageSize": 16, "dtype": "bfloat16"})
    told = status_of(spec, Role.DECODE)
    # SGLang gives DSA models pages of 64 (on every NVIDIA GPU), and decode no radix cache without its flag.
    assert told.settings["disableRadixCache"] == "true"
    assert told.settings["retractionBackup"] == "cpu_tensor"
    assert told.observed is None


def test_a_setting_that_the_engine_changes_is_named_with_both_values() -> None:
    nvidia = {"nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0"}
    spec = spec_of(
        model__geometry=DSA,
        kvCache={"pageSize": 16, "dtype": "bfloat16"},
        prefill__template={"nodeSelector": nvidia},
        decode__template={"nodeSelector": nvidia},
    )
    for role in Role:
        told = status_of(spec, role)
        assert told.settings["pageSize"] == "64"
        (rewrite,) = told.rewrites or ()
        assert (rewrite.name, rewrite.asked, rewrite.effective) == ("pageSize", "16", "64")
        assert "DSA has pages of 64" in rewrite.reason


def test_the_caches_that_matter_to_disaggregation_are_shown_as_the_engine_runs_them() -> None:
    cache = {"ratio": 3, "ioBackend": "direct", "storageBackend": "file"}
    spec = spec_of(prefill__hierarchicalCache=cache, decode__hostKV={"mode": "HostReceive", "threshold": 0.5})
    prefill = status_of(spec, Role.PREFILL).settings
    # page_first (the default) does not go with direct I/O.
    assert prefill["hicacheMemLayout"] == "page_first_direct"
    assert prefill["hicacheRatio"] == "3.0" and prefill["hicacheStorageBackend"] == "file"
    decode = status_of(spec, Role.DECODE).settings
    assert decode["hostKV"] == "HostReceive" and decode["hostReceiveThreshold"] == "0.5"
    assert decode["retractionBackup"] == "host_pool" and decode["hicacheMemLayout"] == "layer_first"


def test_what_ranks_report_goes_before_what_was_worked_out() -> None:
    spec = spec_of(kvCache={"pageSize": 16, "dtype": "float32"}, decode__hierarchicalCache={"layout": "page_head"})
    modelled = status_of(spec, Role.DECODE)
    assert modelled.settings["pageSize"] == "16" and modelled.settings["hicacheMemLayout"] == "page_head"
    resolved = {"hicache_mem_layout": "page_first", "enable_hierarchical_cache": True, "attention_backend": "fa3"}
    told = status_of(spec, Role.DECODE, running(64, resolved))
    assert told.settings["pageSize"] == "64"
    assert told.settings["hicacheMemLayout"] == "page_first"
    assert told.settings["attentionBackend"] == "fa3"
    assert {"pageSize", "hicacheMemLayout", "attentionBackend"} <= set(told.observed or ())
    assert {(r.name, r.asked, r.effective, r.reason) for r in told.rewrites or ()} == {
        ("pageSize", "16", "64", "the running ranks report it so"),
        ("hicacheMemLayout", "page_head", "page_first", "the running ranks report it so"),
    }


def test_the_staging_arenas_of_a_rank_are_shown_in_mib() -> None:
    arena = StagingArena(memory=MemoryKind.DRAM, address=0, slot_bytes=8 << 20, slots=12)
    cards = tuple(c.model_copy(update={"staging": (arena,)}) for c in running(16, {}))
    told = status_of(spec_of(), Role.DECODE, cards)
    assert told.settings["stagingMiB"] == "96" and "stagingMiB" in (told.observed or ())


def test_without_a_spec_that_can_be_read_the_cards_alone_tell() -> None:
    told = engine_status(None, Role.DECODE, running(32, {}))
    assert told is not None and told.settings["pageSize"] == "32" and told.rewrites is None
    assert engine_status(None, Role.DECODE, ()) is None
