"""Settings that a running SGLang resolved, told on a rank's card, go before those it was asked for."""

from __future__ import annotations

import pytest

from pdtransfer.contract.base import EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.compat.observed import facts_from_cards
from pdtransfer.contract.effective import effective, effective_values
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind
from pdtransfer.contract.sglang_cli import told_settings

RUNNING = {
    "attention_backend": "trtllm_mha",
    "page_size": 64,
    "disable_radix_cache": True,
    "disaggregation_decode_retraction_backup": "host_pool",
    "hicache_mem_layout": "layer_first",
    "hicache_ratio": 0.2,
    "max_running_requests": 48,
    "model_path": "/mnt/models",
    "log_level": "info",  # no rule reads it
    "cuda_graph_config": {"decode": "full"},  # not plain
}


def card(settings: tuple[tuple[str, str | int | float | bool | None], ...]) -> RankCard:
    region = Region(layer=0, kind=RegionKind.KEY, item_bytes=64 * 16 * 2, items=8, memory=MemoryKind.VRAM)
    return RankCard(
        cluster_uid="c",
        pod_uid="p",
        role=Role.DECODE,
        incarnation="i",
        model=ModelIdentity(name="m", revision="", dtype="bfloat16", layers=1, total_kv_heads=1, head_dim=16),
        layout=RankLayout(
            page_tokens=64,
            kv_dtype="bfloat16",
            heads=HeadSlice(first=0, count=1, total=1),
            coordinates=RankCoordinates(),
            regions=(region,),
        ),
        engine=EngineFacts(type=EngineType.SGLANG, version="0.5.23", settings=settings),
        agent_name="a",
    )


ASKED = RoleFacts(role=Role.DECODE, page_size=16, hicache_mem_layout="page_first").with_launch_defaults()


def test_only_plain_settings_that_a_rule_reads_go_onto_a_card() -> None:
    told = dict(told_settings(RUNNING))
    assert told["attention_backend"] == "trtllm_mha" and told["disable_radix_cache"] is True
    assert not {"log_level", "cuda_graph_config"} & set(told)


def test_what_runs_goes_before_what_was_asked_for_and_nothing_is_guessed_any_more() -> None:
    facts = facts_from_cards([card(told_settings(RUNNING))], ASKED)
    assert facts.resolved and facts.observed
    assert facts.page_size == 64  # the pool's own
    assert (facts.attention_backend, facts.hicache_mem_layout) == ("trtllm_mha", "layer_first")
    assert facts.retraction_backup == "host_pool" and facts.hicache_ratio == 0.2
    assert effective(facts).rewrites == ()
    assert effective_values(facts)["maxRunningRequests"] == 48


def test_a_card_without_settings_leaves_the_spec_and_its_rewrites() -> None:
    facts = facts_from_cards([card(())], ASKED)
    assert not facts.resolved and facts.hicache_mem_layout == "page_first"


@pytest.mark.parametrize(
    "setting",
    [
        ("max_running_requests", "many"),
        ("disaggregation_decode_host_receive_threshold", "x"),
        ("dcp_size", 0),
        ("a_setting_of_tomorrow", 1),
        ("disable_radix_cache", 7),
    ],
)
def test_a_setting_that_makes_no_sense_is_not_told(setting: tuple[str, str | int | float | bool | None]) -> None:
    facts = facts_from_cards([card((setting, ("hicache_mem_layout", "layer_first")))], ASKED)
    assert facts.hicache_mem_layout == "layer_first"
    RoleFacts.model_validate(facts.model_dump())


def test_a_card_is_still_hashable_and_survives_json() -> None:
    whole = card(told_settings(RUNNING))
    assert hash(whole) == hash(RankCard.model_validate_json(whole.model_dump_json()))
