"""Parts of abcd_driver.py about state. Runs under SGLang's own Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.mooncake import conn as mooncake
from sglang.srt.disaggregation.nixl import conn as nixl

PAGE = 16


def bare(cls: type, **attributes: Any) -> Any:
    """An instance of a class that never ran its constructor."""
    made = object.__new__(cls)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def windows(case: dict[str, Any]) -> dict[str, Any]:
    """The slices of a sliding window's pages between all ranks that meet: refused, or right byte for byte."""
    p_tp, d_tp, heads = case["p"], case["d"], case["heads"]
    held, dim, layers = case.get("window_heads", heads), 8, 2
    src = [PAGE * max(1, held // p_tp) * dim * 2] * (2 * layers)
    dst = [PAGE * max(1, held // d_tp) * dim * 2] * (2 * layers)
    if case.get("envelope"):
        src, dst = [sum(src)], [sum(dst)]
    wrong = 0
    for rank in range(d_tp):
        got: set[int] = set()
        for source in sources(p_tp, d_tp, rank):
            made = bare(
                common.CommonKVManager,
                pp_size=case.get("pp", 1),
                attn_tp_size=p_tp,
                kv_args=SimpleNamespace(
                    swa_kv_cache_layout=case.get("layout", "nhd"),
                    prefill_start_layer=0,
                    total_kv_head_num=heads,
                    kv_head_num=max(1, heads // p_tp),
                    engine_rank=source,
                    page_size=PAGE,
                ),
            )
            bases = [(n + 1) << 32 for n in range(len(src))]
            try:
                blocks = made._get_mha_head_slice_blocks(
                    src_ptrs=bases,
                    src_item_lens=src,
                    dst_ptrs=bases,
                    dst_item_lens=dst,
                    src_page_indices=np.array([3]),
                    dst_page_indices=np.array([5]),
                    dst_attn_tp_size=d_tp,
                    dst_tp_rank=rank,
                )
            except RuntimeError as refused:
                return {"refused": str(refused)}
            for n, (starts, ends, length) in enumerate(blocks):
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                    a, b = start - bases[n] - 3 * src[n], end - bases[n] - 5 * dst[n]
                    wrong += not _same_heads(a, b, length, dim * 2, held, (p_tp, source), (d_tp, rank))
                    got.update(range((n << 24) + b, (n << 24) + b + length))
        wrong += len(got) != sum(dst)
    return {"wrong": wrong}


def sources(p_tp: int, d_tp: int, rank: int) -> list[int]:
    """Prefill ranks that decode rank `rank` asks (as `route` of abcd_driver.py checks them)."""
    if d_tp > p_tp:
        return [rank // (d_tp // p_tp)]
    return list(range(rank * (p_tp // d_tp), (rank + 1) * (p_tp // d_tp)))


def _same_heads(a: int, b: int, length: int, size: int, heads: int, p: tuple[int, int], d: tuple[int, int]) -> bool:
    """Whether both ends of a block are of the same token and the same heads of the model."""

    def place(offset: int, tp: int, rank: int) -> tuple[int, int]:
        count = max(1, heads // tp)
        token, within = divmod(offset, count * size)
        first = rank * count if tp <= heads else rank // (tp // heads)
        return token, first * size + within

    return place(a, *p) == place(b, *d) and length % size == 0


def states(case: dict[str, Any]) -> dict[str, Any]:
    """What a prefill rank does with one state component for a decode rank of another TP, in NIXL and in Mooncake."""
    st = common.StateType(case["type"])
    sent: list[str] = []

    def record(name: str) -> Any:
        def send(*_: Any, **__: Any) -> int:
            sent.append(name)
            return 0

        return send

    ways = (
        "_send_kvcache_generic",
        "_send_swa_state_slice",
        "_send_mamba_state",
        "_send_mamba_state_slice",
        "_send_slot_state",
    )
    args = SimpleNamespace(
        state_types=[st],
        state_data_ptrs=[[1 << 32]],
        state_item_lens=[[64]],
        state_layer_ids=[[0]],
        state_dim_per_tensor=[[case.get("dim", 4)]],
        state_conv_shard_groups=[],
        state_slice_outer_counts=[],
        engine_rank=0,
        gpu_id=0,
    )
    common_attributes: dict[str, Any] = {
        "kv_args": args,
        "is_mla_backend": case.get("mla", False),
        "is_hybrid_mla_backend": False,
        "attn_tp_size": case["p"],
        "state_tp_size": case["p"],
        "pp_size": case.get("pp", 1),
        **{name: record(name) for name in ways},
    }
    if case["backend"] == "NIXL":
        made = bare(nixl.NixlKVManager, _state_layout_rejections={}, _prepared_state_plans={}, **common_attributes)
        run = lambda: list(  # noqa: E731
            made.maybe_send_extra(
                "d", [[0]], [[1 << 33]], [[0]], 0, case["d"], 0, [[64]], [[case.get("dim", 4)]], [[0]]
            )
        )
    else:
        made = bare(mooncake.MooncakeKVManager, request_status={7: 3}, **common_attributes)
        request = SimpleNamespace(room=7, mooncake_session_id="d", dst_state_indices=[[0]])
        peer = SimpleNamespace(
            dst_state_data_ptrs=[[1 << 33]],
            dst_state_item_lens=[[64]],
            dst_state_dim_per_tensor=[[case.get("dim", 4)]],
            dst_state_layer_ids=[[0]],
            dst_attn_tp_size=case["d"],
            dst_tp_rank=0,
        )
        parallel = SimpleNamespace(enable_kv_cache_sharding=False)
        memory = SimpleNamespace(enable_unified_memory=False)

        def run() -> Any:
            with (
                mock.patch.object(mooncake, "get_parallel", lambda: parallel),
                mock.patch.object(mooncake, "get_memory", lambda: memory),
            ):
                return made.maybe_send_extra(request, [[0]], None, peer)

    try:
        run()
    except RuntimeError as refused:
        return {"refused": str(refused)}
    return {"sent": sent}


def strides(case: dict[str, Any]) -> dict[str, Any]:
    """One recurrent slot of `src` bytes on prefill for one of `dst` bytes on decode, at equal TP."""
    if case["backend"] == "Mooncake":
        made = bare(mooncake.MooncakeKVManager, pp_size=1, _transfer_data=lambda *_: 0)
        request = SimpleNamespace(mooncake_session_id="d")
        try:
            made._send_mamba_state(request, [0], [1 << 32], [case["src"]], [1 << 33], [0], [0], [0], [case["dst"]])
        except RuntimeError as refused:
            return {"refused": str(refused)}
        return {"sent": True}
    args = SimpleNamespace(
        state_types=[common.StateType.MAMBA],
        state_data_ptrs=[[1 << 32]],
        state_data_lens=[[case["src"] * 4]],
        state_item_lens=[[case["src"]]],
        state_layer_ids=[[0]],
        mla_compression_ratios=None,
    )
    made = bare(
        nixl.NixlKVManager,
        kv_args=args,
        pp_size=case.get("pp", 1),
        attn_cp_size=case.get("cp", 1),
        dcp_size=case.get("dcp", 1),
        state_tp_size=1,
        attn_tp_size=1,
        is_mla_backend=False,
        _prepared_state_plans={},
        _state_layout_rejections={},
        _use_strided_descs=False,
    )
    with mock.patch.object(nixl, "get_device", lambda: SimpleNamespace(device="cuda")):
        made._prepared_state_components = made._prepared_state_component_indices(case["plugin"])
    peer = SimpleNamespace(
        agent_name="d",
        decode_tp_size=1,
        dst_dcp_size=1,
        requires_dcp_relayout=False,
        dst_state_data_ptrs=[[1 << 33]],
        dst_state_data_lens=[[case["dst"] * 4]],
        dst_state_item_lens=[[case["dst"]]],
        dst_state_layer_ids=[[0]],
    )
    made._prepare_state_xfer(peer)
    return {"refused": made._state_layout_rejections["d"]} if made._state_layout_rejections else {"sent": True}


PARTS = {"windows": windows, "states": states, "strides": strides}
