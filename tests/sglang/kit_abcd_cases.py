"""The grids of pairs that SGLang is asked about (abcd_driver.py), family by family."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from pdtransfer.contract.geometry import AttentionKind, ModelGeometry

GQA, MLA, DSA = AttentionKind.GQA, AttentionKind.MLA, AttentionKind.DSA
Case = dict[str, Any]


def model(kind: AttentionKind = GQA, layers: int = 36, heads: int = 8, **more: Any) -> ModelGeometry:
    latent: Case = {"kv_heads": 1, "head_dim": 576, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    shape = {"kv_heads": heads, "head_dim": 64} if kind is GQA else latent
    return ModelGeometry(attention=kind, layers=layers, dtype="bfloat16", **(shape | more))


SIZES = (1, 2, 3, 4, 6, 8)
POWERS = (1, 2, 4, 8, 16)
KINDS = {"gqa": (False, False), "mla": (True, False), "hybrid": (False, True)}


def cases_route_tp() -> Iterable[Case]:
    for p, d, kind in itertools.product(SIZES, SIZES, KINDS):
        mla, hybrid = KINDS[kind]
        yield {"prefill": {"tp": p}, "decode": {"tp": d}, "mla": mla, "hybrid_mla": hybrid, "kind": kind}


def cases_route_pp() -> Iterable[Case]:
    for p, d in itertools.product((1, 2, 3, 4), repeat=2):
        yield {"prefill": {"tp": 2, "pp": p}, "decode": {"tp": 2, "pp": d}}


def cases_route_cp() -> Iterable[Case]:
    for p, d, all_cp, sharding in itertools.product((1, 2, 4), (1, 2), (False, True), (False, True)):
        side = {"tp": 2, "cp": p, "sharding": sharding}
        yield {"prefill": side, "decode": {"tp": 2, "cp": d, "all_cp": all_cp}, "mla": True}


def cases_route_sharding() -> Iterable[Case]:
    for p, d, cp in itertools.product((2, 4, 8), (2, 4, 8), (1, 2)):
        yield {"prefill": {"tp": p, "cp": cp, "sharding": True}, "decode": {"tp": d}, "mla": True}


def cases_route_dcp() -> Iterable[Case]:
    for dcp, kind, cp, sharding in itertools.product((1, 2), KINDS, (1, 2), (False, True)):
        mla, hybrid = KINDS[kind]
        side = {"tp": 4, "cp": cp, "sharding": sharding}
        yield {"prefill": side, "decode": {"tp": 4, "dcp": dcp}, "mla": mla, "hybrid_mla": hybrid, "kind": kind}


def cases_route_values() -> Iterable[Case]:
    for a, b in itertools.product((1, 16, 64), repeat=2):
        yield {"prefill": {"tp": 2, "page": a}, "decode": {"tp": 2, "page": b}}
    for a, b in itertools.product(("bfloat16", "bf16", "fp8_e4m3"), repeat=2):
        yield {"prefill": {"tp": 2, "dtype": a}, "decode": {"tp": 2, "dtype": b}}


def cases_route_states() -> Iterable[Case]:
    for p, d, kind, state in itertools.product((2, 4), (2, 4), ("gqa", "mla"), ("minimax_index_k", "block_scale")):
        mla, _ = KINDS[kind]
        yield {"prefill": {"tp": p}, "decode": {"tp": d, "states": [state]}, "mla": mla, "kind": kind, "state": state}


def cases_route_dspark() -> Iterable[Case]:
    for a, b, p, d, cp in itertools.product((None, 4, 8), (None, 4, 8), (2, 4), (2, 4), (1, 2)):
        sides = [{"spec_layout": None if n is None else {"num_draft_tokens": n}} for n in (a, b)]
        yield {
            "prefill": {"tp": p, "cp": cp, **sides[0]},
            "decode": {"tp": d, **sides[1], "all_cp": cp > 1},
            "mla": True,
            "tokens": [a, b],
        }


def cases_sliced() -> Iterable[Case]:
    for heads, p, d, dims in itertools.product((1, 2, 4, 8), POWERS, POWERS, ((64, 64), (192, 128), (64, 96))):
        if p != d:
            yield {"heads": heads, "p": p, "d": d, "k_dim": dims[0], "v_dim": dims[1]}


def cases_stages() -> Iterable[Case]:
    for layers, pp in itertools.product((8, 12, 24, 28, 32, 36, 40, 47, 48, 61, 62, 64, 80, 94, 95), range(2, 9)):
        yield {"layers": layers, "pp": pp}


def cases_drafts() -> Iterable[Case]:
    for layers, draft in itertools.product(range(1, 9), range(1, 13)):
        yield {"layers": layers, "draft": draft}


def cases_stages_of_windows() -> Iterable[Case]:
    for layers, pp in itertools.product((8, 24, 36), (2, 3, 4)):
        yield {"layers": layers, "pp": pp, "from_zero": True}


ENTRIES: list[tuple[str, ModelGeometry, Case]] = []
for _pp, _d_pp in ((2, 1), (4, 1), (2, 2), (1, 1)):
    _n = 8 // _pp
    _one = {"pp": _pp, "first": _n if _pp > 1 else 0, "d_pp": _d_pp}
    _ids = [8 // _pp + i for i in range(_n)] if _pp > 1 else list(range(8))
    _all = list(range(8)) if _d_pp == 1 else _ids
    ENTRIES += [
        ("gqa", model(layers=8), _one | {"src": 2 * _n, "dst": 16 // _d_pp}),
        ("swa", model(layers=8, sliding_window_layers=(0, 2)), _one | {"src": 2 * _n, "dst": 16 // _d_pp}),
        ("mla", model(MLA, layers=8), _one | {"src": _n, "dst": 8 // _d_pp, "mla": True}),
        (
            "v4",
            model(DSA, layers=8, model_type="deepseek_v4", architecture="DeepseekV4ForCausalLM"),
            _one | {"src": _n, "dst": 8 // _d_pp, "mla": True, "ratios": [4] * 8},
        ),
        (
            "linear",
            model(layers=8, linear_layers=(1, 3)),
            _one | {"src": 2 * _n, "dst": 2 * len(_all), "ids": [_ids * 2, _all * 2]},
        ),
    ]


def cases_pipelines() -> Iterable[Case]:
    for role, name in itertools.product(
        ("prefill", "decode"), (None, "EAGLE", "EAGLE3", "NGRAM", "STANDALONE", "DFLASH", "DSPARK")
    ):
        yield {"role": role, "algorithm": name}
    for role in ("prefill", "decode"):
        yield {"role": role, "algorithm": "EAGLE", "multi": True}


def cases_windows() -> Iterable[Case]:
    for p, d, heads, held in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (2, 4, 8), (2, 4, 8)):
        if p != d:
            yield {"p": p, "d": d, "heads": heads, "window_heads": held}
    for pp in (1, 2):
        yield {"p": 2, "d": 4, "heads": 8, "pp": pp}


def cases_states() -> Iterable[Case]:
    for backend, st, p, d in itertools.product(
        ("NIXL", "Mooncake"), ("qsa_pending", "qsa_compressed", "block_scale"), (1, 2, 4), (1, 2, 4)
    ):
        yield {"backend": backend, "type": st, "p": p, "d": d}
    for backend, st, p, d in itertools.product(
        ("NIXL", "Mooncake"), ("swa_ring", "c128_state", "swa", "dsa"), (1, 2), (1, 2)
    ):
        yield {"backend": backend, "type": st, "p": p, "d": d, "mla": True}
    for backend, st, pp, d in itertools.product(
        ("NIXL", "Mooncake"), ("minimax_index_k", "minimax_dense_kv"), (1, 2), (2, 4)
    ):
        yield {"backend": backend, "type": st, "p": 2, "d": d, "pp": pp}


def cases_strides() -> Iterable[Case]:
    for plugin, pp, cp, dst in itertools.product(("UCX", "LIBFABRIC"), (1, 2), (1, 2), (64, 128)):
        yield {"backend": "NIXL", "plugin": plugin, "pp": pp, "cp": cp, "src": 128, "dst": dst}
    for dst in (64, 128):
        yield {"backend": "Mooncake", "src": 128, "dst": dst}


def cases_rows() -> Iterable[Case]:
    kernels = ("trtllm", "flashmla_kv", "flashmla_sparse", "fa3")
    for role, a, b in itertools.product(("prefill", "decode"), kernels, kernels):
        yield {"role": role, "prefill": a, "decode": b}
    for role in ("prefill", "decode"):
        yield {"role": role, "prefill": "tilelang", "decode": "tilelang"}
        for kernel in ("tilelang", "triton", "aiter"):
            yield {"role": role, "prefill": kernel, "decode": kernel, "hip": True}


def cases_v4() -> Iterable[Case]:
    for major, backend, layout, kind, dtype in itertools.product(
        (9, 10),
        ("auto", "flashmla", "flashmla_mega"),
        ("", "v4", "v41", "v41_new", "auto"),
        ("deepseek_v4", "deepseek_v41"),
        ("fp8_e4m3", "bfloat16"),
    ):
        yield {"major": major, "backend": backend, "layout": layout, "model_type": kind, "dtype": dtype}


_PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_M3 = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl"}


def _m3(frequency: list[int], off: list[int] | None) -> Case:
    sparse = {"sparse_attention_freq": frequency} | ({} if off is None else {"sparse_disable_index_value": off})
    return _M3 | {"text_config": _PLAIN | {"model_type": "minimax_m2", "sparse_attention_config": sparse}}


CONFIGS: list[Case] = [
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_PLAIN},
    {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **_PLAIN},
    _m3([0, 1, 1, 1], [0, 1, 1, 1]),
    _m3([0, 1, 1, 1], [0, 1, 0, 1]),
    _m3([0, 1, 1, 1], None),
    _m3([0, 0, 0, 0], None),
    {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": _PLAIN
        | {
            "model_type": "qwen4_exp_text",
            "full_attention_interval": 4,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
        },
    },
    *(
        {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **_PLAIN, **more}
        | {"full_attention_interval": 4}
        for more in ({}, {"mamba_ssm_dtype": "bfloat16"}, {"mamba_ssm_dtype": "odd"})
    ),
    *(
        {"architectures": ["MiniCPMSALAForCausalLM"], "model_type": "minicpm_sala", **_PLAIN, **more}
        for more in (
            {},
            {"sparse_config": {"topk": 64}},
            {"sparse_config": {"topk": 64}, "mixer_types": ["lightning"]},
            {"sparse_config": {"topk": 64}, "mixer_types": ["lightning-attn", "minicpm4"]},
            {"sparse_config": {"topk": 64}, "mixer_types": ["lightning_attn", "attn"]},
        )
    ),
]

ASKED: dict[str, list[Case]] = {
    "route": [
        *cases_route_tp(),
        *cases_route_pp(),
        *cases_route_cp(),
        *cases_route_sharding(),
        *cases_route_dcp(),
        *cases_route_values(),
        *cases_route_states(),
        *cases_route_dspark(),
    ],
    "pipelines": list(cases_pipelines()),
    "sliced": list(cases_sliced()),
    "stages": [*cases_stages(), *cases_drafts(), *cases_stages_of_windows()],
    "entries": [case for _, _, case in ENTRIES],
    "regions": [{"src": a, "dst": b} for a, b in itertools.product((4, 6), repeat=2)],
    "shorter": [
        {"layers": layers, "draft": draft, "mla": mla}
        for layers, draft, mla in itertools.product((4, 36), (1, 2), (False, True))
    ],
    "contexts": [{"p": p, "d": d, "mla": mla} for p, d, mla in itertools.product((1, 2, 4), (1, 2, 4), (False, True))],
    "packs": [
        {"items": [16 * 1152] * layers, "page": 16, "tokens": tokens, "dcp": dcp}
        for layers, tokens, dcp in itertools.product((4, 61), (1024, 8192, 32768), (2, 3, 8))
    ],
    "windows": list(cases_windows()),
    "states": list(cases_states()),
    "strides": list(cases_strides()),
    "rows": list(cases_rows()),
    "v4_layouts": list(cases_v4()),
    "auto_dtype": [{"major": major} for major in (8, 9, 10, 12)],
    "head_by_head": [{"pool": "MHA"}, {"pool": "MLA"}],
    "families": [{"config": config} for config in CONFIGS],
    "index_value_pool": [{"values": True}, {"values": False}],
    "window_pool": [{"full": [4, 6], "sliding": [5, 7]}],
}
