"""Facts from the real answers of two SGLang 0.5.23 servers (a P/D pair on a CPU, TP 2 and 1, backend nixl)."""

from __future__ import annotations

from typing import Any

import pytest

from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.facts import HostKVMode
from pdtransfer.contract.sglang_cli import NoServerInfo, prefill_route, route_contradictions, server_facts
from real_answers import answer


def test_a_real_prefill_answer() -> None:
    read = server_facts(answer("prefill_server_info"))
    facts = read.facts
    assert read.role is Role.PREFILL and facts.role is Role.PREFILL and read.problems == ()
    assert (facts.engine, facts.engine_version, facts.observed) == (EngineType.SGLANG, "0.5.23", True)
    assert facts.backend is Backend.NIXL
    assert facts.resolved  # nothing is worked out again that SGLang has decided
    assert (facts.tensor_parallel, facts.attention_tp, facts.page_size) == (2, 2, 16)
    assert (facts.kv_dtype, facts.model_dtype, facts.chunked_prefill_size) == ("auto", "auto", 256)
    assert facts.max_total_tokens == 4096 and facts.bootstrap_port == 31721
    assert facts.speculative_algorithm == "" and facts.disable_radix_cache is False
    assert facts.memory_kinds == {MemoryKind.VRAM}
    # What only the environment tells stays unknown.
    assert facts.staging_buffer is None and facts.nixl_backend is None


def test_a_real_decode_answer() -> None:
    facts = server_facts(answer("decode_server_info")).facts
    assert facts.role is Role.DECODE and facts.tensor_parallel == 1
    assert facts.disable_radix_cache is True and facts.decode_radix_cache is False  # SGLang's own rewrite, rule E1
    assert facts.retraction_backup == "cpu_tensor" and facts.host_kv is HostKVMode.OFF


def test_the_real_route_says_the_same_as_the_server() -> None:
    route = prefill_route(answer("prefill_route"))
    facts = server_facts(answer("prefill_server_info")).facts
    assert (route.attn_tp_size, route.page_size, route.kv_cache_dtype) == (2, 16, "auto")
    assert route_contradictions(route, facts) == ()


def test_another_servers_route_is_told() -> None:
    route = prefill_route(answer("prefill_route") | {"attn_tp_size": 4, "prefill_http_port": 30000})
    found = route_contradictions(route, server_facts(answer("prefill_server_info")).facts)
    assert len(found) == 2 and "attention TP 4" in found[0] and "port 30000" in found[1]


def test_attention_dp_is_the_routes_dp() -> None:
    # SGLang turns --dp-size 2 --enable-dp-attention into attn_dp_size 2 and still reports the old flag.
    info = answer("prefill_server_info") | {"attn_dp_size": 2, "dp_size": 1, "enable_dp_attention": True}
    facts = server_facts(info).facts
    assert (facts.attention_dp, facts.attention_tp) == (2, 1)
    route = prefill_route(answer("prefill_route") | {"dp_size": 2, "attn_tp_size": 1})
    assert route_contradictions(route, facts) == ()


@pytest.mark.parametrize(
    "info, why",
    [
        ([], "no JSON object but list"),
        ("x", "no JSON object but str"),
        ({}, "no disaggregation_mode"),
        ({"disaggregation_mode": 3}, "no disaggregation_mode"),
        ({"disaggregation_mode": "null"}, "no part of a P/D pair"),
        ({"disaggregation_mode": "prefill", "tp_size": "2"}, "its tp_size is '2', not a whole number"),
        ({"disaggregation_mode": "prefill", "tp_size": True}, "its tp_size is True"),
        ({"disaggregation_mode": "prefill", "version": 5}, "its version is 5"),
        ({"disaggregation_mode": "prefill", "engine": "Reference"}, "its kv_memory_kinds are None"),
    ],
)
def test_a_wrong_answer_names_the_field(info: Any, why: str) -> None:
    with pytest.raises(NoServerInfo, match=why.replace("(", r"\(")):
        server_facts(info)


@pytest.mark.parametrize("change, field", [({"attn_tp_size": "2"}, "attn_tp_size"), ({"page_size": 1.5}, "page_size")])
def test_a_wrong_route_names_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(NoServerInfo, match=field):
        prefill_route(answer("prefill_route") | change)
    with pytest.raises(NoServerInfo, match="attn_tp_size"):
        prefill_route({})


def test_settings_of_another_version_are_left_unknown() -> None:
    info = {k: v for k, v in answer("decode_server_info").items() if k not in ("page_size", "dcp_size", "version")}
    facts = server_facts(info).facts
    assert facts.page_size is None and facts.engine_version is None and facts.dcp_size == 1


def test_a_backend_that_no_rule_knows_is_named() -> None:
    read = server_facts(answer("decode_server_info") | {"disaggregation_transfer_backend": "mori"})
    assert any("'mori'" in p for p in read.problems)
