"""What holds of the fit check for any facts: total, deterministic, and honest about what our mover does."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.compat import RULES, Report, Status, check, check_cards, check_rank_pair
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.geometry import AttentionKind, ModelGeometry
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind

maybe_bool = st.sampled_from([None, True, False])
small = st.integers(1, 17)
words = st.sampled_from([None, "", "auto", "bf16", "fp8_e4m3", "mxfp8", "nvfp4", "EAGLE", "NGRAM", "x"])


@st.composite
def geometries(draw: st.DrawFn) -> ModelGeometry:
    layers = draw(st.integers(1, 12))
    some = st.lists(st.integers(0, layers - 1), unique=True, max_size=layers).map(tuple)
    return ModelGeometry(
        attention=draw(st.sampled_from(AttentionKind)),
        layers=layers,
        kv_heads=draw(small),
        head_dim=draw(small),
        v_head_dim=draw(st.none() | small),
        sliding_window_layers=draw(some),
        linear_layers=draw(some),
        model_type=draw(st.sampled_from([None, "minimax_m3", "deepseek_v4", "llama"])),
        max_context=draw(st.none() | small),
    )


def role_facts(role: Role) -> st.SearchStrategy[RoleFacts]:
    return st.builds(
        RoleFacts,
        role=st.just(role),
        engine=st.sampled_from(EngineType),
        engine_version=st.sampled_from([None, "", "0.5.23", "0.6.0rc1", "nightly"]),
        backend=st.sampled_from(Backend),
        geometry=st.none() | geometries(),
        model_name=words,
        model_revision=words,
        model_dtype=words,
        tensor_parallel=small,
        pipeline_parallel=small,
        attention_data_parallel=small,
        context_parallel=small,
        data_parallel=small,
        dp_attention_flag=st.booleans(),
        page_size=st.none() | small,
        kv_dtype=words,
        chunked_prefill_size=st.sampled_from([None, -1, 0, 16, 1000]),
        context_length=st.none() | small,
        decode_radix_cache=maybe_bool,
        disable_radix_cache=maybe_bool,
        hierarchical_cache=maybe_bool,
        decode_offload=maybe_bool,
        hicache_storage_backend=words,
        retraction_backup=st.sampled_from([None, "", "host_pool", "cpu_tensor"]),
        mixed_chunk=maybe_bool,
        host_kv=st.sampled_from(HostKVMode),
        memory_kinds=st.none() | st.frozensets(st.sampled_from(MemoryKind)),
        segments=st.none() | st.integers(0, 4),
        speculative_algorithm=words,
        staging_buffer=maybe_bool,
        nixl_backend=words,
        bootstrap_port=st.none() | small,
        host=st.sampled_from([None, "", "localhost", "[::1]", "0.0.0.0", "%"]),
        layers=st.none() | st.just((0, 1)),
        observed=st.booleans(),
        page_size_requested=st.none() | small,
        max_total_tokens=st.none() | small,
        regions_without_memory_kind=st.none() | st.integers(0, 4),
        dcp_size=small,
        dsa_backend=st.sampled_from([None, "trtllm", "flashmla_kv"]),
        draft_layers=st.none() | small,
        optimistic_prefill=maybe_bool,
        all_cp_ranks_transfer=maybe_bool,
        sampling_mask=maybe_bool,
        ssm_dtype=words,
    )


@settings(max_examples=200, deadline=None)
@given(role_facts(Role.PREFILL), role_facts(Role.DECODE), st.none() | st.sampled_from(Backend))
def test_check_is_total_deterministic_and_speaks_of_every_rule(
    prefill: RoleFacts, decode: RoleFacts, backend: Backend | None
) -> None:
    report = check(prefill, decode, backend)
    assert report == check(prefill.model_copy(), decode.model_copy(), backend)
    assert [f.rule for f in report.findings] + list(report.deferred) != []
    assert {f.rule for f in report.findings} | set(report.deferred) == {r.id for r in RULES}
    assert len(report.findings) + len(report.deferred) == len(RULES)
    for finding in report.findings:
        if finding.status in (Status.FAIL, Status.WARN):
            assert finding.message and finding.action and finding.severity
        if finding.status is Status.UNKNOWN:
            assert finding.needs and finding.message and finding.action
    assert Report.model_validate_json(report.to_json()) == report


@settings(max_examples=100, deadline=None)
@given(role_facts(Role.PREFILL), role_facts(Role.DECODE), st.sampled_from(Backend))
def test_knowing_more_never_turns_a_fail_into_unknown(prefill: RoleFacts, decode: RoleFacts, backend: Backend) -> None:
    """Filling in defaults settles Unknown; a rule that failed on known facts keeps an answer. Not those that
    the engine may rewrite: its defaults tell which."""
    before = {f.rule: f.status for f in check(prefill, decode, backend).findings}
    full = check(prefill.with_launch_defaults(), decode.with_launch_defaults(), backend)
    kept = {r.id for r in RULES if not REWRITTEN & set(r.needs)}
    for finding in full.findings:
        if before.get(finding.rule) is Status.FAIL and finding.rule in kept:
            assert finding.status is Status.FAIL, finding.rule


REWRITTEN = frozenset({"page_size", "kv_dtype", "dsa_backend", "model_dtype"})

tiny = st.integers(1, 3)
layouts = st.builds(
    RankLayout,
    page_tokens=tiny,
    kv_dtype=st.sampled_from(["bfloat16", "auto", "fp8_e4m3", "nvfp4", ""]),
    heads=st.none() | st.builds(HeadSlice, first=st.integers(0, 3), count=tiny, total=tiny),
    coordinates=st.builds(
        RankCoordinates,
        tp=st.integers(0, 3),
        tp_size=tiny,
        pp=st.integers(0, 2),
        pp_size=tiny,
        dp=st.integers(0, 1),
        dp_size=tiny,
        cp_size=tiny,
    ),
    regions=st.lists(
        st.builds(
            Region,
            layer=st.integers(0, 3),
            kind=st.sampled_from(RegionKind),
            item_bytes=st.integers(1, 64),
            items=tiny,
            memory=st.none() | st.sampled_from(MemoryKind),
            draft=st.booleans(),
        ),
        max_size=5,
    ).map(tuple),
)
any_int = st.none() | st.integers(-2, 4)


def cards_of(role: Role) -> st.SearchStrategy[list[RankCard]]:
    card = st.builds(
        RankCard,
        cluster_uid=st.just("c"),
        pod_uid=st.sampled_from(["a", "b"]),
        role=st.sampled_from([role, role, role.other]),
        incarnation=st.just("i"),
        model=st.builds(
            ModelIdentity,
            name=st.just("m"),
            dtype=st.sampled_from(["bfloat16", "odd"]),
            layers=st.integers(-1, 4),
            total_kv_heads=any_int,
            head_dim=any_int,
            v_head_dim=any_int,
        ),
        layout=layouts,
        engine=st.builds(
            EngineFacts, type=st.sampled_from(EngineType), version=st.just(""), backend=st.sampled_from(Backend)
        ),
        agent_name=st.just("g"),
    )
    return st.lists(card, min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(cards_of(Role.PREFILL), cards_of(Role.DECODE), st.booleans())
def test_checks_on_cards_are_total_and_deterministic_whatever_a_peer_sends(
    prefill: list[RankCard], decode: list[RankCard], sealed: bool
) -> None:
    if sealed:
        prefill, decode = [c.sealed() for c in prefill], [c.sealed() for c in decode]
    report = check_cards(prefill, decode)
    assert report == check_cards(prefill, decode)
    pair_report = check_rank_pair(prefill[0], decode[0])
    assert pair_report == check_rank_pair(prefill[0], decode[0])
    if not sealed:
        assert report.verdict is Status.FAIL and pair_report.verdict is Status.FAIL


POWERS = st.sampled_from([1, 2, 4, 8, 16])


@settings(max_examples=150, deadline=None)
@given(POWERS, POWERS, POWERS, st.integers(1, 4), st.integers(1, 4), st.sampled_from(AttentionKind), st.booleans())
def test_divisible_tp_never_fails_a_parallelism_rule_with_our_mover(
    heads: int, p: int, d: int, p_stages: int, d_stages: int, attention: AttentionKind, v_differs: bool
) -> None:
    geometry = ModelGeometry(
        attention=attention, layers=36, kv_heads=heads, head_dim=64, v_head_dim=32 if v_differs else None
    )
    # Around the mover, SGLang's own classes map one decode stage or prefill's number only (A8).
    engine = EngineType.SGLANG if d_stages in (1, p_stages) else EngineType.REFERENCE
    common: dict[str, Any] = {
        "engine": engine,
        "geometry": geometry,
        "memory_kinds": frozenset(MemoryKind),
        "page_size": 16,
        "kv_dtype": "bfloat16",
    }
    report = check(
        RoleFacts(role=Role.PREFILL, tensor_parallel=p, pipeline_parallel=p_stages, **common).with_launch_defaults(),
        RoleFacts(role=Role.DECODE, tensor_parallel=d, pipeline_parallel=d_stages, **common).with_launch_defaults(),
        Backend.PDCLUSTER,
    )
    assert [f for f in report.findings if f.rule[0] in "A" and f.status is not Status.PASS] == []
    assert [f for f in report.findings if f.rule == "F3" and f.status is not Status.PASS] == []


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 16), st.integers(1, 16), st.sampled_from(Backend))
def test_a3_is_symmetric_in_the_two_sizes(p: int, d: int, backend: Backend) -> None:
    def status(first: int, second: int) -> Status | None:
        report = check(
            RoleFacts(role=Role.PREFILL, tensor_parallel=first),
            RoleFacts(role=Role.DECODE, tensor_parallel=second),
            backend,
        )
        finding = report.finding("A3")
        return finding.status if finding else None

    assert status(p, d) is status(d, p)
    assert (status(p, d) is Status.PASS) == (max(p, d) % min(p, d) == 0)
