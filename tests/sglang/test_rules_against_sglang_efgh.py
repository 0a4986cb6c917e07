"""Families E to H against SGLang 0.5.23 itself: which servers it refuses at launch, and its functions run on grids.

Where the two disagree, SGLang is right. What it decides with its pools on a GPU (E3's models, E6's recurrent state, F4,
F10's pools, G1, G2) was read, not run.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from kit_driver import ask_driver
from kit_settings import Case, as_facts, ask

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat import Status, check
from pdtransfer.contract.compat.devices import gpu_ids
from pdtransfer.contract.compat.staging import chunk_bytes
from pdtransfer.contract.effective import effective
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import AttentionKind, ModelGeometry

RUN_S = 200
P, D = Role.PREFILL, Role.DECODE
LAUNCH = frozenset({"E2", "E4", "E6", "E11", "F2", "F5", "F10", "G3", "H6"})
"""Rules of E to H whose START SGLang gives while it resolves a command line (F2 does so later, with the backend)."""
BUFFERED = ("--enable-hierarchical-cache", "--hicache-host-memory-mode", "buffer_only")
HICACHE = ("--enable-hierarchical-cache",)
RADIX = ("--disaggregation-decode-enable-radix-cache",)
STORED = ("--hicache-storage-backend", "file")
MOONCAKE_STORE = ("--hicache-storage-backend", "mooncake")
POOL = ("--disaggregation-decode-retraction-backup", "host_pool")
TENSOR = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
OFFLOAD = ("--disaggregation-decode-enable-offload-kvcache",)
RECEIVE = ("--disaggregation-decode-host-receive-threshold", "0.5")
SPARSE = ("--enable-hisparse",)
DCP = ("--tp-size", "4", "--dcp-size", "2")
RUST = {"SGLANG_RUST_SERVER": "1"}

CASES = [
    Case("llama", "SM90", D, HICACHE),
    Case("llama", "SM90", D, (*HICACHE, *RADIX)),
    Case("llama", "SM90", P, HICACHE),
    Case("llama", "SM90", P, (*HICACHE, "--disable-radix-cache")),
    Case("llama", "SM90", P, ("--disable-radix-cache",)),
    Case("llama", "SM90", D, OFFLOAD),
    Case("llama", "SM90", D, (*OFFLOAD, *STORED)),
    Case("llama", "SM90", D, (*OFFLOAD, *STORED, *POOL)),
    Case("llama", "SM90", D, (*OFFLOAD, *STORED, *TENSOR)),
    Case("llama", "SM90", P, (*OFFLOAD, *STORED)),
    Case("llama", "SM90", P, POOL),
    Case("llama", "SM90", P, TENSOR),
    Case("llama", "SM90", D, POOL),
    Case("deepseek_v3", "SM90", D, (*POOL, *DCP)),
    Case("deepseek_v3", "SM90", D, DCP),
    Case("llama", "SM90", D, (*POOL, "--enable-priority-scheduling")),
    Case("llama", "SM90", D, (*POOL, "--enable-priority-scheduling", "--disable-priority-preemption")),
    Case("llama", "SM90", D, ("--enable-priority-scheduling",)),
    Case("llama", "SM90", P, BUFFERED),
    Case("llama", "SM90", P, (*BUFFERED, *STORED)),
    Case("llama", "SM90", D, (*BUFFERED, *STORED, *RADIX)),
    Case("llama", "SM90", P, BUFFERED[1:]),
    Case("qwen3_next", "SM90", D, BUFFERED[1:]),
    Case("qwen3_next", "SM90", D, (*BUFFERED[1:], *TENSOR)),
    Case("llama", "SM90", P, (*HICACHE, "--hicache-host-memory-fraction", "0")),
    Case("llama", "SM90", P, (*HICACHE, "--hicache-host-memory-fraction", "1")),
    Case("llama", "SM90", P, (*HICACHE, "--hicache-host-memory-fraction", "1.5")),
    Case("llama", "SM90", P, (*HICACHE, *DCP)),
    Case("deepseek_v3", "SM90", P, (*HICACHE, *DCP)),
    Case("deepseek_v3", "SM90", P, (*BUFFERED, *STORED, *DCP)),
    Case("llama", "SM90", D, RECEIVE),
    Case("llama", "SM90", D, (*RECEIVE, *TENSOR)),
    Case("llama", "SM90", D, (*RECEIVE, *MOONCAKE_STORE)),
    Case("llama", "SM90", D, (*RECEIVE, *STORED)),
    Case("llama", "SM90", D, ("--disaggregation-decode-host-receive-threshold", "1.5")),
    Case("deepseek_v32", "SM90", D, (*RECEIVE, *SPARSE)),
    Case("llama", "SM90", D, SPARSE),
    Case("deepseek_v3", "SM90", D, SPARSE),
    Case("deepseek_v32", "SM90", D, SPARSE),
    Case("deepseek_v4", "SM90", D, SPARSE),
    Case("deepseek_v32", "SM90", D, (*SPARSE, "--enable-mixed-chunk")),
    Case("deepseek_v32", "SM90", D, (*SPARSE, *RADIX)),
    *(
        Case("deepseek_v32", "SM90", D, (*SPARSE, "--kv-cache-dtype", dtype, "--dsa-decode-backend", kernels))
        for dtype, kernels in itertools.product(
            ("bfloat16", "fp8_e4m3"), ("flashmla_sparse", "flashmla_kv", "fa3", "flashinfer_sparse_mla", "trtllm")
        )
    ),
    *(Case("llama", "SM90", role, (), {"SGLANG_DISAGG_STAGING_BUFFER": "1"}) for role in (P, D)),
    Case("llama", "SM90", P, ("--port", "31000", "--disaggregation-bootstrap-port", "9000"), RUST),
    Case("llama", "SM90", P, ("--port", "31000", "--disaggregation-bootstrap-port", "31000"), RUST),
    Case("llama", "SM90", P, ("--port", "31000"), RUST),
]


def refused(case: Case) -> list[str]:
    """Our rules of E to H that say START for this server; the other side has no flag of its own."""
    mine = as_facts(case)
    theirs = as_facts(Case(case.model, case.accelerator, mine.role.other))
    p, d = (mine, theirs) if case.role is P else (theirs, mine)
    report = check(p, d, Backend.NIXL)
    found = [f.rule for f in report.of(Status.FAIL) if f.severity == "START" and f.rule in LAUNCH]
    return [rule for rule in found if rule != "F2"]


@pytest.fixture(scope="module")
def launches() -> dict[str, dict[str, Any]]:
    return ask(CASES, ["page_size"], check=True)


def test_what_sglang_refuses_at_launch_a_rule_says_start_to_and_nothing_else(
    launches: dict[str, dict[str, Any]],
) -> None:
    wrong = {}
    for case in CASES:
        rules, error = refused(case), launches[case.id].get("error", "")
        if bool(rules) != bool(error):
            wrong[case.id] = f"rules {rules}, SGLang: {error or 'starts'}"
    assert not wrong, json.dumps(wrong, indent=1)
    # Both answers occur for every rule that has one here.
    said = {rule for case in CASES for rule in refused(case)}
    assert said == {"E2", "E4", "E6", "E11", "F5", "F10", "H6"}


STAGED = list(itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (4, 8)))
DEVICES = [
    "mlx5_0",
    "mlx5_0,mlx5_1",
    "mlx5_0, mlx5_1",
    "mlx5_0:1",
    "mlx5_0,",
    ",",
    '{"0": "mlx5_0"}',
    '{"0": "mlx5_0", "1": "mlx5_1:1"}',
    '{"0": "mlx5_0:1"}',
    '{"1": "mlx5_0"}',
    '{"00": "mlx5_0"}',
    '{"a": "mlx5_0"}',
    '{"0": 5}',
    "{}",
    "{0: mlx5_0}",
    "{",
]
PLACES = [
    # tp, pp, replicas (--dp-size), nodes, base, step, one visible device for each process
    (1, 1, 1, 1, 0, 1, False),
    (4, 1, 1, 1, 0, 1, False),
    (4, 1, 1, 1, 4, 1, False),
    (4, 1, 1, 1, 1, 2, False),
    (2, 3, 1, 1, 0, 1, False),
    (2, 2, 1, 1, 0, 2, False),
    (8, 1, 1, 2, 0, 1, False),
    (2, 4, 1, 2, 0, 1, False),
    (4, 2, 1, 4, 0, 1, False),
    (2, 1, 3, 1, 0, 1, False),
    (2, 2, 2, 1, 1, 2, False),
    (4, 1, 1, 1, 0, 1, True),
]
MAPS = ['{"0": "mlx5_0", "1": "mlx5_1"}', '{"0": "mlx5_0"}', '{"4": "mlx5_4", "5": "mlx5_5", "6": "a", "7": "b"}']
FLAGS = ("ssm", "dcp", "radix", "offload", "priority", "keep", "hicache")
RETRACTED = [
    (pool, *flags, tokens)
    for pool in ("mha", "mla")
    for flags in itertools.product((False, True), repeat=len(FLAGS))
    for tokens in (16384, 81920)
    # HiCache needs the radix cache on decode (E2).
    if not (flags[FLAGS.index("hicache")] and not flags[FLAGS.index("radix")])
]


@pytest.fixture(scope="module")
def functions() -> dict[str, list[Any]]:
    """Answers of SGLang's functions, from one process of its own Python."""
    asked = {
        "staging": [[p, d, heads, 8192, 128, 36] for p, d, heads in STAGED],
        "devices": [[text] for text in DEVICES],
        "gpus": [list(place) for place in PLACES],
        "lookups": [[text, gpu] for text in MAPS for gpu in range(12)],
        "retraction": RETRACTED,
        "logprobs": [[]],
    }
    answers: dict[str, list[Any]] = ask_driver("efgh_driver.py", asked, RUN_S)
    return answers


def _model(**more: Any) -> ModelGeometry:
    shape: dict[str, Any] = {"attention": AttentionKind.GQA, "layers": 36, "kv_heads": 8, "head_dim": 64}
    return ModelGeometry(**(shape | {"dtype": "bfloat16", "architecture": "LlamaForCausalLM"} | more))


def test_g6_room_of_a_chunk(functions: dict[str, list[Any]]) -> None:
    for (p, d, heads), theirs in zip(STAGED, functions["staging"], strict=True):
        if p != d:
            assert chunk_bytes(_model(kv_heads=heads), 8192, p, d, "bfloat16") == theirs, (p, d, heads)


def test_h3_devices_that_nixl_takes(functions: dict[str, list[Any]]) -> None:
    """A JSON object is checked whole here: what names another GPU's device wrongly fails on that GPU's rank."""
    facts = {"geometry": _model(), "backend": Backend.NIXL}
    for text, theirs in zip(DEVICES, functions["devices"], strict=True):
        d = RoleFacts(role=D, ib_device=text, **facts).with_launch_defaults()
        finding = check(RoleFacts(role=P, **facts).with_launch_defaults(), d).finding("H3")
        takes = not isinstance(theirs, dict)
        if text == '{"0": "mlx5_0", "1": "mlx5_1:1"}':
            assert takes and finding and finding.status is Status.FAIL
        else:
            assert finding and (finding.status is Status.PASS) == takes, (text, theirs, finding)


def _placed(place: tuple[int, int, int, int, int, int, bool], **more: Any) -> RoleFacts:
    tp, pp, replicas, nodes, base, step, one = place
    sizes = {"tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": replicas, "nodes": nodes}
    at = {"base_gpu_id": base, "gpu_id_step": step, "one_visible_device": one}
    return RoleFacts(role=D, geometry=_model(), **sizes, **at, **more).with_launch_defaults()


def test_h3_gpu_of_each_rank(functions: dict[str, list[Any]]) -> None:
    """The numbers that SGLang's launchers start their processes with."""
    for place, theirs in zip(PLACES, functions["gpus"], strict=True):
        assert set(gpu_ids(_placed(place))) == set(theirs), (place, theirs)


def test_h3_a_map_without_the_gpu_of_a_rank_ends_its_start(functions: dict[str, list[Any]]) -> None:
    """Each rank looks its own number up, and SGLang raises there; nothing falls back to other devices."""
    found = iter(functions["lookups"])
    known = {text: {gpu for gpu in range(12) if not isinstance(next(found), dict)} for text in MAPS}
    assert [sorted(k) for k in known.values()] == [[0, 1], [0], [4, 5, 6, 7]]
    said = set()
    for place, used in zip(PLACES, functions["gpus"], strict=True):
        for text, backend in itertools.product(MAPS, Backend):
            d = _placed(place, ib_device=text, backend=backend)
            finding = check(d.model_copy(update={"role": P, "ib_device": ""}), d).finding("H3")
            starts = set(used) <= known[text]
            assert finding and (finding.status is Status.PASS) == starts, (place, text, finding)
            said.add(starts)
    assert said == {True, False}


def test_e5_retraction_backup_and_ratio(functions: dict[str, list[Any]]) -> None:
    for given, theirs in zip(RETRACTED, functions["retraction"], strict=True):
        pool, *flags, tokens = given
        on = dict(zip(FLAGS, flags, strict=True))
        latent = {"attention": AttentionKind.MLA, "kv_heads": 1} if pool == "mla" else {}
        facts = RoleFacts(
            role=D,
            geometry=_model(linear_layers=(0,) if on["ssm"] else (), **latent),
            accelerator=Accelerator.SM90,
            page_size=64,
            max_total_tokens=tokens,
            context_length=8192,
            tensor_parallel=2,
            dcp_size=2 if on["dcp"] else 1,
            decode_radix_cache=on["radix"],
            decode_offload=on["offload"],
            hicache_storage_backend="file",
            priority_scheduling=on["priority"],
            disable_priority_preemption=on["keep"],
            hierarchical_cache=on["hicache"],
        ).with_launch_defaults()
        ours = effective(facts).facts
        assert ours.retraction_backup == theirs["backup"], given
        if ours.hicache_ratio is not None:  # we say nothing of a pool that is not built
            assert ours.hicache_ratio == pytest.approx(theirs["ratio"]), given


def test_h12_room_for_logprobs(functions: dict[str, list[Any]]) -> None:
    from pdtransfer.contract.compat.endpoints import TOP_LOGPROBS

    assert functions["logprobs"] == [TOP_LOGPROBS]
