"""Families B, C and D against SGLang 0.5.23 itself, as test_rules_against_sglang_abcd.py does for A."""

from __future__ import annotations

from typing import Any

from kit_abcd import CP, PP, TP, differ, facts, kind_of, sglang, word
from kit_abcd_cases import (
    ASKED,
    DSA,
    GQA,
    MLA,
    Case,
    cases_drafts,
    cases_route_dspark,
    cases_route_states,
    cases_route_values,
    cases_rows,
    cases_states,
    cases_strides,
    cases_v4,
    cases_windows,
    model,
)

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat.formats import dsa_auto_dtype, raw_rows, v4_layout
from pdtransfer.contract.families import is_deepseek_v4, is_minimax_m3
from pdtransfer.contract.geometry import from_hf_config


def test_b1_b3_are_compared_as_they_stand() -> None:
    found = []
    for case, answer in sglang("route", cases_route_values()):
        p, d = case["prefill"], case["decode"]
        rule, name = ("B1", "page_size") if "page" in p else ("B3", "kv_dtype")
        sides = {TP: 2, name: p.get("page", p.get("dtype"))}, {TP: 2, name: d.get("page", d.get("dtype"))}
        found.append((case, word(rule, model(), *sides), "DCRASH" if "refused" in answer else ""))
    assert differ(found) == []


def test_b8_d4_state_that_decode_compares() -> None:
    found = []
    m3 = model(layers=60, heads=4, architecture="MiniMaxM3SparseForCausalLM")
    for case, answer in sglang("route", cases_route_states()):
        sides = {TP: case["prefill"]["tp"]}, {TP: case["decode"]["tp"]}
        if case["state"] == "minimax_index_k":
            if case["kind"] == "mla":
                continue  # MiniMax-M3 has no latent rows
            ours = word("D4", m3, *sides)
        else:
            mxfp8 = {"kv_dtype": "mxfp8"}
            ours = word("B8", kind_of(case["kind"]), sides[0] | mxfp8, sides[1] | mxfp8)
        found.append((case, ours, "DCRASH" if "refused" in answer else ""))
    assert differ(found) == []


def test_b5_b6_b10_b11_how_rows_are_laid_out() -> None:
    found: list[tuple[Any, object, object]] = []
    names = {8: Accelerator.SM80, 9: Accelerator.SM90, 10: Accelerator.SM100, 12: Accelerator.SM120}
    for case, answer in sglang("auto_dtype", ASKED["auto_dtype"]):
        found.append((case, dsa_auto_dtype(names[case["major"]]), answer["dtype"]))
    for case, answer in sglang("rows", cases_rows()):
        role = Role(case["role"])
        chip = Accelerator.ROCM if case.get("hip") else Accelerator.SM90
        one = facts(role, model(DSA, index_head_dim=128), dsa_backend=case[case["role"]], accelerator=chip)
        found.append((case, 576 if raw_rows(one) else 656, answer["bytes"]))
    for case, answer in sglang("head_by_head", ASKED["head_by_head"]):
        kind = MLA if case["pool"] == "MLA" else GQA
        ours = word("B10", model(kind), {"hnd_kv_cache": True}, {})
        found.append((case, ours, "START" if "refused" in answer else ""))
    for case, answer in sglang("v4_layouts", cases_v4()):
        if "refused" in answer:
            continue  # SGLang does not start with it there
        geometry = model(DSA, model_type=case["model_type"], architecture="DeepseekV4ForCausalLM")
        one = facts(
            Role.PREFILL,
            geometry,
            accelerator=names[case["major"]],
            dsv4_attention_backend=case["backend"],
            dsv4_kv_layout=case["layout"],
            kv_dtype=case["dtype"],
        )
        found.append((case, v4_layout(one, geometry).split("/")[0], answer["layout"]))
    assert differ(found) == []


def test_c1_c2_regions_of_a_draft() -> None:
    draft = {"speculative_algorithm": "EAGLE"}
    for case, answer in sglang("regions", ASKED["regions"]):
        p, d = (draft if n == 6 else {} for n in (case["src"], case["dst"]))
        assert word("C2", model(), p, d) == ("PDEAD" if "refused" in answer else "")
        assert word("C1", model(), p, d) == ""


def test_c6_dspark_layouts() -> None:
    v41 = model(DSA, model_type="deepseek_v41", architecture="DeepseekV4ForCausalLM")
    found = []
    for case, answer in sglang("route", cases_route_dspark()):
        p, d = case["prefill"], case["decode"]
        spec = [{} if n is None else {"speculative_algorithm": "DSPARK", "draft_tokens": n} for n in case["tokens"]]
        sides = {TP: p["tp"] * p["cp"], CP: p["cp"], **spec[0]}, {TP: d["tp"], **spec[1]}
        found.append((case, word("C6", v41, *sides), "DCRASH" if "refused" in answer else ""))
    assert differ(found) == []


def test_d2_slices_of_a_window() -> None:
    """What SGLang's code refuses is refused; what it slices it slices right. That a whole engine does it nobody has
    seen, and users report hangs: there the rule says HANG, not what this function does."""
    found = []
    for case, answer in sglang("windows", cases_windows()):
        geometry = model(
            heads=case["heads"], swa_kv_heads=case.get("window_heads"), sliding_window_layers=tuple(range(0, 36, 2))
        )
        if "refused" not in answer:
            assert answer["wrong"] == 0, case
        sides = {TP: case["p"], PP: case.get("pp", 1)}, {TP: case["d"]}
        found.append((case, word("D2", geometry, *sides), "REQ" if "refused" in answer else "HANG"))
    assert differ(found) == []
    assert {row[2] for row in found} == {"REQ", "HANG"}


def test_d3_d4_state_at_unequal_tp() -> None:
    found = []
    for case, answer in sglang("states", cases_states()):
        backend, name = Backend(case["backend"]), case["type"]
        refused = "REQ" if backend is Backend.NIXL else "PDEAD"
        sides = {TP: case["p"], PP: case.get("pp", 1)}, {TP: case["d"], PP: case.get("pp", 1)}
        if name.startswith("minimax"):
            m3 = model(layers=60, heads=4, architecture="MiniMaxM3SparseForCausalLM")
            # At unequal TP decode refuses before a byte moves.
            theirs = "DCRASH" if case["p"] != case["d"] else refused if "refused" in answer else ""
            found.append((case, word("D4", m3, *sides, backend), theirs))
            continue
        if name.startswith("qsa"):
            geometry, dtype = model(compressed_index_heads=4, linear_layers=(0, 1)), "bfloat16"
        else:
            geometry, dtype = model(MLA if case.get("mla") else GQA), "mxfp8" if name == "block_scale" else "bfloat16"
        dtypes = ({**side, "kv_dtype": dtype} for side in sides)
        found.append((case, word("D3", geometry, *dtypes, backend), refused if "refused" in answer else ""))
    assert differ(found) == []


def test_d4_index_values() -> None:
    for case, answer in sglang("index_value_pool", ASKED["index_value_pool"]):
        m3 = model(layers=60, architecture="MiniMaxM3SparseForCausalLM", index_values=case["values"])
        assert word("D4", m3, {}, {}) == ("START" if "refused" in answer else "")


def test_d5_sizes_of_recurrent_state() -> None:
    found = []
    geometry = model(linear_layers=(0, 1), ssm_dtype="float32")
    for case, answer in sglang("strides", cases_strides()):
        backend = Backend(case["backend"])
        p: Case = {"ssm_dtype": "float32", PP: case.get("pp", 1), CP: case.get("cp", 1), TP: case.get("cp", 1)}
        d: Case = {"ssm_dtype": "float32" if case["src"] == case["dst"] else "bfloat16", PP: case.get("pp", 1)}
        if "plugin" in case:
            p |= {"nixl_backend": case["plugin"]}
            d |= {"nixl_backend": case["plugin"]}
        differs = case["src"] != case["dst"]
        refused = "REQ" if backend is Backend.NIXL else "PDEAD"
        theirs = refused if "refused" in answer else "WRONG" if differs else ""
        found.append((case, word("D5", geometry, p, d, backend), theirs))
    assert differ(found) == []


def test_models_are_what_sglang_takes_them_for() -> None:
    for case, answer in sglang("families", ASKED["families"]):
        geometry = from_hf_config(case["config"])
        ours: Case = {
            "v4": is_deepseek_v4(geometry),
            "m3": is_minimax_m3(geometry),
            "qsa": geometry.compressed_index_heads is not None,
        }
        if geometry.linear_layers:
            ours["ssm"] = geometry.ssm_dtype
        if "index_values" in answer:
            ours["index_values"] = geometry.index_values
        if "minicpm" in answer:
            ours["minicpm"] = geometry.minicpm_sparse
        assert ours == {name: answer[name] for name in ours}, case


def test_c3_a_deep_draft_moves_v() -> None:
    found = []
    for case, answer in sglang("stages", cases_drafts()):
        d = {"speculative_algorithm": "STANDALONE", "draft_layers": case["draft"]}
        theirs = "WRONG" if answer["wrong_v"] or answer["wrong_k"] else ""
        geometry = model(layers=case["layers"])
        found.append((case, word("C3", geometry, {TP: 1}, d | {TP: 2}), theirs))
        # Mooncake asks the same function at equal TP.
        found.append((case, word("C3", geometry, {TP: 2}, d | {TP: 2}, Backend.MOONCAKE), theirs))
    assert differ(found) == []


def test_c2_mooncake_maps_drafts_that_decode_has_not() -> None:
    found = []
    for case, answer in sglang("shorter", ASKED["shorter"]):
        geometry = model(MLA if case["mla"] else GQA, layers=case["layers"])
        theirs = "WRONG" if answer.get("over") else "PDEAD" if answer.get("index_error") else ""
        found.append((case, word("C2", geometry, {"speculative_algorithm": "EAGLE"}, {}, Backend.MOONCAKE), theirs))
    assert differ(found) == []
