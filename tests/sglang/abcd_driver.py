"""Runs under SGLang's own Python: what SGLang 0.5.23's transfer classes do with a grid of pairs.

`python abcd_driver.py < cases.json > answers.json`: {part: [case, ...]} in, {part: [answer, ...]} out.
Managers are made without their constructors (no sockets, no agents) and get the attributes that the function under
test reads; the functions themselves are SGLang's, unchanged. Only what would move bytes is recorded instead.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import abcd_rows
import abcd_state
import numpy as np
from abcd_state import PAGE, bare, sources
from sglang.srt.arg_groups.validation_hook import check_pipeline_parallel_compat
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common.dcp_pack import dcp_pack_buffer_bytes
from sglang.srt.disaggregation.nixl import conn as nixl
from sglang.srt.distributed.utils import get_pp_indices


def route(case: dict[str, Any]) -> dict[str, Any]:
    """What decode does with prefill's answer to /route: the checks, then the mapping of every decode rank.

    A pair that is admitted answers with its target ranks, how often SGLang warned, and which ranks it never asks."""
    p, d = case["prefill"], case["decode"]
    info = {
        "attn_tp_size": p["tp"],
        "attn_cp_size": p.get("cp", 1),
        "dp_size": 1,
        "pp_size": p.get("pp", 1),
        "page_size": p.get("page", PAGE),
        "kv_cache_dtype": p.get("dtype", "bfloat16"),
        "follow_bootstrap_room": True,
        "kv_layout": p.get("kv_layout"),
        "dsv41_spec_layout": p.get("spec_layout"),
        "enable_kv_cache_sharding": p.get("sharding", False),
    }
    answer = SimpleNamespace(status_code=200, json=lambda: dict(info), text="")
    warned: list[str] = []
    asked: set[int] = set()
    with (
        mock.patch.object(common.requests, "get", return_value=answer),
        mock.patch.object(common.logger, "warning_once", warned.append, create=True),
    ):
        for rank in range(d["tp"]):
            made = bare(
                common.CommonKVManager,
                prefill_info_table={},
                kv_args=SimpleNamespace(
                    page_size=d.get("page", PAGE),
                    engine_rank=rank,
                    state_types=[common.StateType(name) for name in d.get("states", ())],
                ),
                kv_cache_dtype_str=d.get("dtype", "bfloat16"),
                kv_layout=d.get("kv_layout"),
                dsv41_spec_layout=d.get("spec_layout"),
                attn_tp_size=d["tp"],
                attn_cp_size=d.get("cp", 1),
                attn_cp_rank=0,
                pp_size=d.get("pp", 1),
                pp_rank=0,
                dcp_size=d.get("dcp", 1),
                is_mla_backend=case.get("mla", False),
                is_hybrid_mla_backend=case.get("hybrid_mla", False),
                enable_all_cp_ranks_for_transfer=d.get("all_cp", False),
            )
            try:
                admitted = made.try_ensure_parallel_info("prefill:8998")
            except (RuntimeError, AssertionError) as refused:
                return {"refused": str(refused)}
            if not admitted:
                return {"error": "no answer"}
            found = made.prefill_info_table["prefill:8998"]
            asked.update(found.target_tp_ranks)
    return {
        "beyond": sorted(r for r in asked if r >= p["tp"]),
        "never": sorted(set(range(p["tp"])) - asked),
        "warned": len(warned),
        "cp_ranks": found.target_cp_ranks,
    }


def sliced(case: dict[str, Any]) -> dict[str, Any]:
    """NIXL's lists for unequal TP, for every pair of ranks that meet: does each run stay inside its region, and which
    source slices a first peer leaves for the later ones."""
    heads, p_tp, d_tp = case["heads"], case["p"], case["d"]
    k_dim, v_dim, layers, slots = case["k_dim"], case["v_dim"], 2, 4

    def item(tp: int, dim: int) -> int:
        return PAGE * max(1, heads // tp) * dim * 2

    p_items = [item(p_tp, k_dim)] * layers + [item(p_tp, v_dim)] * layers
    d_items = [item(d_tp, k_dim)] * layers + [item(d_tp, v_dim)] * layers
    p_ptrs, d_ptrs = addresses(p_items, slots), addresses(d_items, slots)
    outside, widths = 0, set()
    for rank in range(d_tp):
        for source in sources(p_tp, d_tp, rank):
            lists: list[tuple[str, np.ndarray]] = []
            made = bare(
                nixl.NixlKVManager,
                attn_tp_size=p_tp,
                prep_handle_slice_src=None,
                prep_handles_slice_dst={},
                kv_args=SimpleNamespace(
                    page_size=PAGE,
                    total_kv_head_num=heads,
                    kv_head_num=max(1, heads // p_tp),
                    engine_rank=source,
                    gpu_id=0,
                    kv_item_lens=p_items,
                    kv_data_lens=[n * slots for n in p_items],
                    kv_data_ptrs=p_ptrs,
                    prefill_start_layer=0,
                ),
                agent=SimpleNamespace(
                    prep_xfer_dlist=lambda peer, runs, kind, kept=lists: kept.append((peer, runs)) or object()
                ),
            )
            peer = SimpleNamespace(
                decode_tp_size=d_tp,
                decode_tp_rank=rank,
                dst_kv_item_len=d_items[0],
                dst_kv_ptrs=d_ptrs,
                dst_num_slots=slots,
                gpu_id=0,
            )
            try:
                made._init_hetero_tp_prep_handle("decode", peer)
            except AssertionError:
                return {"assertion": True}
            for name, runs in lists:
                items, ptrs = (p_items, p_ptrs) if name == "" else (d_items, d_ptrs)
                for (start, length, _, stride, count), size, at in zip(runs.tolist(), items, ptrs, strict=True):
                    outside += start < at or start + stride * (count - 1) + length > at + size * slots
                    if name == "":
                        widths.add((int(length), int(count)))
    return {"assertion": False, "outside": outside, "widths": sorted(widths)}


def addresses(items: list[int], slots: int) -> list[int]:
    """Regions of `slots` items, far apart."""
    found, at = [], 1 << 32
    for size in items:
        found.append(at)
        at += size * slots + (1 << 20)
    return found


def stages(case: dict[str, Any]) -> dict[str, Any]:
    """Where a stage's K and V go in decode's list, for every stage: (wrong K, wrong V) layers."""
    total, draft = case["layers"], case.get("draft", 0)
    ends = [get_pp_indices(total, rank, case.get("pp", 1)) for rank in range(case.get("pp", 1))]
    decode = [("K", i) for i in range(total)] + [("V", i) for i in range(total)]
    decode += [("dK", i) for i in range(draft)] + [("dV", i) for i in range(draft)]
    wrong_k = wrong_v = 0
    for first, end in ends:
        count = end - first
        source = [("K", first + i) for i in range(count)] + [("V", first + i) for i in range(count)]
        made = bare(
            common.CommonKVManager,
            kv_args=SimpleNamespace(prefill_start_layer=0 if case.get("from_zero") else first),
        )
        k, v, dk, dv, _ = made.get_mha_kv_ptrs_with_pp(source, decode)
        wrong_k += list(k) != list(dk)
        wrong_v += list(v) != list(dv)
    return {"wrong_k": wrong_k, "wrong_v": wrong_v, "stages": ends}


def entries(case: dict[str, Any]) -> dict[str, Any]:
    """NIXL's pairing of a prefill stage's entries with decode's, equal TP or MLA."""
    n_src, n_dst, first = case["src"], case["dst"], case.get("first", 0)
    ids = case.get("ids")
    made = bare(
        nixl.NixlKVManager,
        pp_size=case["pp"],
        is_mla_backend=case.get("mla", False),
        is_hybrid_mla_backend=case.get("hybrid_mla", False),
        kv_args=SimpleNamespace(
            kv_layer_ids=ids[0] if ids else [],
            mla_compression_ratios=case.get("ratios"),
            kv_item_lens=[64] * n_src,
            prefill_start_layer=first,
            num_draft_entries=0,
        ),
    )
    peer = SimpleNamespace(dst_kv_layer_ids=ids[1] if ids else [], dst_kv_item_lens=[64] * n_dst)
    try:
        return {"indices": made._build_transfer_dst_indices(peer_info=peer, n_src=n_src, n_dst=n_dst)}
    except RuntimeError as refused:
        return {"refused": str(refused)}


def regions(case: dict[str, Any]) -> dict[str, Any]:
    """NIXL's first look at a peer whose number of regions differs (drafts on one side)."""
    made = bare(nixl.NixlKVManager, kv_args=SimpleNamespace(kv_item_lens=[64] * case["src"]), src_mem_kind="VRAM")
    try:
        made._prepare_payload_xfer(SimpleNamespace(dst_kv_item_lens=[64] * case["dst"]))
    except ValueError as refused:
        return {"refused": str(refused)}
    except AttributeError:
        return {"admitted": True}  # it went on to what this stand-in does not have
    return {"admitted": True}


def shorter(case: dict[str, Any]) -> dict[str, Any]:
    """Mooncake's way to a decode list without prefill's draft entries: which of the model's own get a draft's."""
    layers, draft = case["layers"], case["draft"]
    names = ["L"] if case["mla"] else ["K", "V"]
    decode = [(name, i) for name in names for i in range(layers)]
    source = decode + [(f"d{name}", i) for name in names for i in range(draft)]
    made = bare(
        common.CommonKVManager,
        kv_args=SimpleNamespace(prefill_start_layer=0, num_draft_entries=draft, mla_compression_ratios=None),
    )
    if case["mla"]:
        src, dst, count = made.get_mla_kv_ptrs_with_pp(source, decode)
        return {"over": sum(src[i][0] != dst[i][0] for i in range(count))}
    _, v, _, dv, count = made.get_mha_kv_ptrs_with_pp(source, decode)
    return {"index_error": count > len(dv), "sent": len(v)}


def contexts(case: dict[str, Any]) -> dict[str, Any]:
    """Whether prefill takes a decode rank of another decode context parallelism."""
    made = bare(
        common.CommonKVManager,
        dcp_size=case["p"],
        dcp_rank=0,
        is_mla_backend=case["mla"],
        is_hybrid_mla_backend=False,
    )
    try:
        return {"relayout": made.requires_dcp_relayout(case["d"], 0)}
    except RuntimeError as refused:
        return {"refused": str(refused)}


def packs(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes of one buffer for decode context parallelism."""
    return {"bytes": dcp_pack_buffer_bytes(case["items"], case["page"], case["tokens"], case["dcp"])}


def pipelines(case: dict[str, Any]) -> dict[str, Any]:
    """Whether a server with pipeline stages takes this speculation."""
    cfg = SimpleNamespace(
        disable_overlap_schedule=True,
        speculative_algorithm=case["algorithm"],
        disaggregation_mode=case["role"],
        enable_multi_layer_eagle=case.get("multi", False),
        min_free_slots_delay=None,
    )
    try:
        check_pipeline_parallel_compat(cfg)
    except AssertionError as refused:
        return {"refused": str(refused)}
    return {"taken": True}


PARTS = {
    "pipelines": pipelines,
    "route": route,
    "sliced": sliced,
    "stages": stages,
    "entries": entries,
    "regions": regions,
    "shorter": shorter,
    "contexts": contexts,
    "packs": packs,
    **abcd_state.PARTS,
    **abcd_rows.PARTS,
}


def main() -> None:
    """All parts of stdin at once: {part: [case, ...]} in, {part: [answer, ...]} out."""
    asked: dict[str, list[dict[str, Any]]] = json.load(sys.stdin)
    print(json.dumps({part: [PARTS[part](case) for case in cases] for part, cases in asked.items()}))


if __name__ == "__main__":
    main()
