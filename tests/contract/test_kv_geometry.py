"""Byte formulas and head slices against values worked out by hand from section 7 of the SGLang PD rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.contract.geometry import (
    AttentionKind,
    GeometryError,
    ModelGeometry,
    dtype_bytes,
    is_fp8,
    region_bytes,
)

LLAMA_70B = ModelGeometry(attention=AttentionKind.GQA, layers=80, kv_heads=8, head_dim=128, dtype="bfloat16")
MIMO = ModelGeometry(attention=AttentionKind.GQA, layers=48, kv_heads=4, head_dim=192, v_head_dim=128)
DEEPSEEK = ModelGeometry(
    attention=AttentionKind.MLA, layers=61, kv_heads=1, head_dim=576, kv_lora_rank=512, qk_rope_head_dim=64
)
DEEPSEEK_32 = DEEPSEEK.model_copy(update={"attention": AttentionKind.DSA, "index_head_dim": 128})


@pytest.mark.parametrize(
    ("geometry", "page", "tp", "dtype", "k", "v"),
    [
        (LLAMA_70B, 1, 1, "bfloat16", 2048, 2048),
        (LLAMA_70B, 64, 4, "bfloat16", 32768, 32768),
        (LLAMA_70B, 64, 4, "fp8_e4m3", 16384, 16384),
        (LLAMA_70B, 64, 8, "auto", 16384, 16384),
        (LLAMA_70B, 64, 16, "bfloat16", 16384, 16384),
        (MIMO, 64, 2, "bfloat16", 49152, 32768),
    ],
)
def test_k_and_v_items_follow_heads_page_and_dtype(
    geometry: ModelGeometry, page: int, tp: int, dtype: str, k: int, v: int
) -> None:
    assert geometry.key_item_bytes(page, tp, dtype) == k
    assert geometry.value_item_bytes(page, tp, dtype) == v


def test_an_mla_item_is_576_elements_a_token_whatever_the_tp() -> None:
    assert DEEPSEEK.latent_item_bytes(1, "bfloat16") == 1152
    assert DEEPSEEK.latent_item_bytes(64, "bfloat16") == 73728
    assert DEEPSEEK.latent_item_bytes(64, "fp8_e4m3") == 64 * 576
    assert DEEPSEEK.page_bytes(64, 1, "bfloat16") == DEEPSEEK.page_bytes(64, 16, "bfloat16") == 61 * 73728


def test_a_dsa_fp8_row_is_656_bytes_and_raw_576() -> None:
    assert DEEPSEEK_32.latent_item_bytes(1, "fp8_e4m3") == 656
    assert DEEPSEEK_32.latent_item_bytes(64, "fp8_e4m3") == 41984
    assert DEEPSEEK_32.latent_item_bytes(1, "fp8_e4m3", raw_fp8=True) == 576
    assert DEEPSEEK_32.latent_item_bytes(1, "bfloat16") == 1152


def test_an_index_key_page_is_132_bytes_a_token() -> None:
    assert DEEPSEEK_32.index_item_bytes(64) == 8448
    assert DEEPSEEK_32.index_item_bytes(64, kpool=4) == 2112
    assert LLAMA_70B.index_item_bytes(64) == 0


def test_a_region_holds_one_page_more_than_the_pool() -> None:
    assert region_bytes(32768, tokens=65536, page_size=64) == 32768 * 1025


def test_a_requests_bytes_count_whole_pages_after_the_cached_prefix() -> None:
    # 80 layers x (K 32768 + V 32768) = 5242880 bytes a page.
    assert LLAMA_70B.request_bytes(1000, 64, 4, "bfloat16") == 16 * 5242880
    assert LLAMA_70B.request_bytes(1000, 64, 4, "bfloat16", cached_prefix=640) == 6 * 5242880
    assert LLAMA_70B.request_bytes(10, 64, 4, "bfloat16", cached_prefix=64) == 0


def test_only_paged_layers_count() -> None:
    swa = LLAMA_70B.model_copy(update={"sliding_window_layers": tuple(range(0, 80, 2)), "kvless_layers": (79,)})
    assert len(swa.kv_layers) == 39
    assert swa.page_bytes(64, 4, "bfloat16") == 39 * 65536


@pytest.mark.parametrize(
    ("dtype", "size"), [("bf16", 2), ("float16", 2), ("float32", 4), ("fp8_e5m2", 1), ("torch.bfloat16", 2)]
)
def test_dtype_bytes(dtype: str, size: int) -> None:
    assert dtype_bytes(dtype) == size


def test_auto_needs_the_models_dtype_and_4_bit_has_no_whole_bytes() -> None:
    assert dtype_bytes("auto", "float16") == 2
    with pytest.raises(GeometryError, match="not known"):
        dtype_bytes("auto")
    with pytest.raises(GeometryError, match="fp4"):
        dtype_bytes("fp4_e2m1")
    assert is_fp8("fp8_e5m2") and not is_fp8("bfloat16")


def test_a_latent_row_of_unknown_width_is_an_error_that_names_it() -> None:
    from_card = ModelGeometry(attention=AttentionKind.MLA, layers=4, kv_heads=1, head_dim=576)
    with pytest.raises(GeometryError, match="kv_lora_rank"):
        from_card.latent_item_bytes(64, "bfloat16")
    with pytest.raises(GeometryError, match="attention"):
        LLAMA_70B.latent_item_bytes(64, "bfloat16")


@pytest.mark.parametrize(
    ("heads", "tp", "slices"),
    [
        (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (4, 4, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_head_slices_and_their_replication(heads: int, tp: int, slices: list[tuple[int, int]]) -> None:
    geometry = LLAMA_70B.model_copy(update={"kv_heads": heads})
    found = [geometry.head_slice(r, tp) for r in range(tp)]
    assert [(s.first, s.count) for s in found if s] == slices
    assert {s.total for s in found if s} == {heads}


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_all_ranks_together_hold_each_head_equally_often(heads: int, tp: int) -> None:
    geometry = LLAMA_70B.model_copy(update={"kv_heads": heads})
    held = [h for r in range(tp) if (s := geometry.head_slice(r, tp)) for h in range(s.first, s.first + s.count)]
    copies = max(1, tp // heads)
    assert sorted(held) == sorted(list(range(heads)) * copies)


def test_heads_that_do_not_split_and_ranks_outside_are_named() -> None:
    with pytest.raises(GeometryError, match="8 KV heads do not split over 6 ranks"):
        LLAMA_70B.head_slice(0, 6)
    with pytest.raises(GeometryError, match="tp_rank"):
        LLAMA_70B.head_slice(4, 4)
    assert DEEPSEEK.head_slice(3, 6) is None


def test_the_last_stages_take_the_remaining_layers() -> None:
    # 94 layers over 4 stages: 23, 23, 24, 24 (rule A10 names 23 and 24).
    geometry = LLAMA_70B.model_copy(update={"layers": 94})
    stages = [geometry.stage_layers(s, 4) for s in range(4)]
    assert [len(s) for s in stages] == [23, 23, 24, 24]
    assert [layer for stage in stages for layer in stage] == list(range(94))


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 12))
def test_stages_cut_the_layers_once_in_order(layers: int, pp: int) -> None:
    geometry = LLAMA_70B.model_copy(update={"layers": layers})
    assert [i for s in range(pp) for i in geometry.stage_layers(s, pp)] == list(range(layers))


def test_layer_lists_outside_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 40 is outside"):
        ModelGeometry(attention=AttentionKind.GQA, layers=4, kv_heads=1, head_dim=8, linear_layers=(40,))
