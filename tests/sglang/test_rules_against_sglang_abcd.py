"""Family A against SGLang 0.5.23 itself: its classes run over grids of pairs, beside what the rules say.

Where the two disagree, SGLang is right. What it decides at launch is in test_rules_against_sglang_launch.py.
"""

from __future__ import annotations

import itertools

import pytest
from kit_abcd import CP, PP, TP, differ, facts, kind_of, sglang, word
from kit_abcd_cases import (
    ASKED,
    ENTRIES,
    GQA,
    MLA,
    POWERS,
    cases_pipelines,
    cases_route_cp,
    cases_route_dcp,
    cases_route_pp,
    cases_route_sharding,
    cases_route_tp,
    cases_sliced,
    cases_stages,
    cases_stages_of_windows,
    model,
)

from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat.context import pack_bytes


def test_a3_a5_ranks_that_decode_asks() -> None:
    three, five = [], []
    for case, answer in sglang("route", cases_route_tp()):
        p, d, geometry = {TP: case["prefill"]["tp"]}, {TP: case["decode"]["tp"]}, kind_of(case["kind"])
        theirs = "REQ" if answer["beyond"] else "HANG" if answer["never"] else ""
        three.append((case, word("A3", geometry, p, d), theirs))
        five.append((case, word("A5", geometry, p, d), "WARN" if answer["warned"] else ""))
    assert differ(three) == [] and differ(five) == []
    assert {row[2] for row in three} == {"REQ", "HANG", ""}


@pytest.mark.parametrize(
    ("backend", "outcome"), [(Backend.NIXL, "DCRASH"), (Backend.MOONCAKE, "DCRASH"), (Backend.PDCLUSTER, "REQ")]
)
def test_a8_a12_stages_and_context_parallel_ranks(backend: Backend, outcome: str) -> None:
    """The plugin makes a failed request of what SGLang's common classes raise (test_plugin_contacts)."""
    eight = [
        (
            case,
            word("A8", model(), {TP: 2, PP: case["prefill"]["pp"]}, {TP: 2, PP: case["decode"]["pp"]}, backend),
            outcome if "refused" in answer else "",
        )
        for case, answer in sglang("route", cases_route_pp())
    ]
    twelve = []
    for case, answer in sglang("route", cases_route_cp()):
        p, d = case["prefill"], case["decode"]
        sides = {TP: 2 * p["cp"], CP: p["cp"]}, {TP: 2 * d["cp"], CP: d["cp"]}
        twelve.append((case, word("A12", model(MLA), *sides, backend), outcome if "refused" in answer else ""))
    assert differ(eight) == [] and differ(twelve) == []


def test_a13_decode_asks_all_context_parallel_ranks_where_its_variable_or_prefill_says_so() -> None:
    """With one side's variable set, decode asks as many ranks as send only where prefill's cache is sharded."""
    found = []
    for case, answer in sglang("route", cases_route_cp()):
        p, d = case["prefill"], case["decode"]
        if "refused" in answer or p["cp"] == 1:
            continue
        sending = p["cp"] if p["sharding"] else 1  # prefill's own variable is not set
        sides = (
            {TP: 2 * p["cp"], CP: p["cp"], "kv_cache_sharding": p["sharding"]},
            {TP: 2, "all_cp_ranks_transfer": d["all_cp"]},
        )
        agrees = len(answer["cp_ranks"]) == sending
        found.append((case, word("A13", model(MLA), *sides), "" if agrees else "HANG"))
    assert differ(found) == []


def test_a14_a15_decode_context_parallelism() -> None:
    fourteen = [
        (
            case,
            word(
                "A14",
                model(MLA if case["mla"] else GQA),
                {TP: 4, "dcp_size": case["p"]},
                {TP: 4, "dcp_size": case["d"]},
            ),
            "PDEAD" if "refused" in answer else "",
        )
        for case, answer in sglang("contexts", ASKED["contexts"])
    ]
    fifteen = []
    for case, answer in sglang("route", cases_route_dcp()):
        p, dcp = case["prefill"], case["decode"]["dcp"]
        sides = (
            {TP: 4 * p["cp"], CP: p["cp"], "kv_cache_sharding": p["sharding"]},
            {TP: 4, "dcp_size": dcp},
        )
        fifteen.append((case, word("A15", kind_of(case["kind"]), *sides), "DCRASH" if "refused" in answer else ""))
    assert differ(fourteen) == [] and differ(fifteen) == []


def test_a17_bytes_of_the_buffers() -> None:
    found = []
    for case, answer in sglang("packs", ASKED["packs"]):
        geometry = model(MLA, layers=len(case["items"]))
        p = facts(Role.PREFILL, geometry, tensor_parallel=8, chunked_prefill_size=case["tokens"])
        d = facts(Role.DECODE, geometry, tensor_parallel=8, dcp_size=case["dcp"])
        found.append((case["dcp"], pack_bytes(p, d), 4 * answer["bytes"]))
    assert differ(found) == []


def test_a18_sharded_rows_need_equal_tp() -> None:
    found = []
    for case, answer in sglang("route", cases_route_sharding()):
        p, d = case["prefill"], case["decode"]
        sides = {TP: p["tp"] * p["cp"], CP: p["cp"], "kv_cache_sharding": True}, {TP: d["tp"]}
        found.append((case, word("A18", model(MLA), *sides), "DCRASH" if "refused" in answer else ""))
    assert differ(found) == []


def test_a6_a7_slices_of_unequal_tp() -> None:
    six, seven = [], []
    for case, answer in sglang("sliced", cases_sliced()):
        geometry = model(heads=case["heads"], head_dim=case["k_dim"], v_head_dim=case["v_dim"])
        sides = {TP: case["p"]}, {TP: case["d"]}
        six.append((case, word("A6", geometry, *sides), "PDEAD" if answer["assertion"] else ""))
        if answer["assertion"]:
            continue
        alike = case["k_dim"] == case["v_dim"]
        theirs = "PDEAD" if answer["outside"] else "" if alike else "WRONG"
        seven.append((case, word("A7", geometry, *sides), theirs))
    assert differ(six) == [] and differ(seven) == []
    assert {row[2] for row in seven} == {"", "WRONG", "PDEAD"}


def test_a21_the_first_peers_slices_serve_another_size() -> None:
    widths = {
        (c["heads"], c["p"], c["d"]): a["widths"]
        for c, a in sglang("sliced", cases_sliced())
        if not a["assertion"] and c["k_dim"] == c["v_dim"]
    }
    found = []
    for heads, p in itertools.product((1, 2, 4, 8), POWERS):
        sizes = [d for d in POWERS if (heads, p, d) in widths]
        for first, other in itertools.combinations(sizes, 2):
            ours = word("A21", model(heads=heads), {TP: p, "decode_tp_sizes": {first, other}}, {TP: other})
            same = widths[heads, p, first] == widths[heads, p, other]
            found.append(((heads, p, first, other), ours, "" if same else "REQ"))
    assert differ(found) == []
    assert {row[2] for row in found} == {"", "REQ"}


def test_a10_where_v_is_looked_for() -> None:
    found, cut = [], []
    for case, answer in sglang("stages", cases_stages()):
        geometry = model(layers=case["layers"])
        assert not answer["wrong_k"]
        theirs = "WRONG" if answer["wrong_v"] else ""
        found.append((case, word("A10", geometry, {TP: 1, PP: case["pp"]}, {TP: 2}), theirs))
        found.append((case, word("A10", geometry, {TP: 1, PP: case["pp"]}, {TP: 1}, Backend.MOONCAKE), theirs))
        stages = [geometry.stage_layers(rank, case["pp"]) for rank in range(case["pp"])]
        cut.append((case, [[s[0], s[-1] + 1] for s in stages], answer["stages"]))
    assert differ(found) == [] and differ(cut) == []


def test_a9_pairing_of_stages() -> None:
    answers = sglang("entries", ASKED["entries"])
    found = []
    for (name, geometry, case), (_, answer) in zip(ENTRIES, answers, strict=True):
        ours = word("A9", geometry, {TP: 2, PP: case["pp"]}, {TP: 2, PP: case["d_pp"]})
        found.append(((name, case), ours, "PDEAD" if "refused" in answer else ""))
    assert differ(found) == []
    # What is paired is paired rightly: the second stage's layers are decode's of the same number.
    plain = [answer["indices"] for (name, _, case), (_, answer) in zip(ENTRIES, answers, strict=True) if name == "mla"]
    assert plain == [[4, 5, 6, 7], [2, 3], [0, 1, 2, 3], list(range(8))]


def test_a9_stages_of_sliding_windows_count_from_0_in_mooncake() -> None:
    assert [a["first"] for _, a in sglang("window_pool", ASKED["window_pool"])] == [0]
    windows = model(sliding_window_layers=tuple(range(0, 36, 2)))
    for case, answer in sglang("stages", cases_stages_of_windows()):
        assert answer["wrong_k"] == case["pp"] - 1  # only the first stage's are at 0
        assert word("A9", windows, {PP: case["pp"]}, {}, Backend.MOONCAKE) == "WRONG"


def test_a11_speculation_in_pipeline_stages() -> None:
    found = []
    for case, answer in sglang("pipelines", cases_pipelines()):
        side = {PP: 2, "speculative_algorithm": case["algorithm"] or "", "multi_layer_eagle": case.get("multi", False)}
        sides = (side, {PP: 1}) if case["role"] == "prefill" else ({PP: 2}, side)
        found.append((case, word("A11", model(), *sides), "START" if "refused" in answer else ""))
    assert differ(found) == []


def test_a_rule_that_says_something_else_would_show() -> None:
    """Negative control: the rule of context parallel ranks is not that of stages."""
    rows = []
    for case, answer in sglang("route", cases_route_pp()):
        sides = {TP: 2, PP: case["prefill"]["pp"]}, {TP: 2, PP: case["decode"]["pp"]}
        rows.append((case, word("A12", model(), *sides), "DCRASH" if "refused" in answer else ""))
    # Decode's 2, 3 and 4 stages, each beside three others of prefill's.
    assert len(differ(rows)) == 9
