"""The forward pass against transformers' LlamaForCausalLM, without any process around it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference_kit import Truth

from pdtransfer.engines.reference.checkpoint import open_checkpoint
from pdtransfer.engines.reference.collective import Collective
from pdtransfer.engines.reference.kv_pool import PagedKVPool, PoolShape
from pdtransfer.engines.reference.llama import LlamaShard, Span, rope_table
from pdtransfer.engines.reference.model_config import RopeScaling, load_config
from pdtransfer.engines.reference.problems import SetupError
from pdtransfer.engines.reference.tiny_model import make_tiny_model

PAGE = 8


class ThreadCollective(Collective):
    """Ranks as threads of the test: sums and gathers through a barrier."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, box: list[torch.Tensor | None]) -> None:
        self.rank, self.size, self.barrier, self.box = rank, size, barrier, box

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.box[self.rank] = x
        self.barrier.wait(20)
        found = [t for t in self.box if t is not None]
        self.barrier.wait(20)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)


def shard(folder: Path, rank: int, collective: Collective, memory: str = "dram") -> tuple[LlamaShard, PagedKVPool]:
    config = load_config(folder)
    shape = PoolShape(config.layers, 16, PAGE, config.kv_slice(rank, collective.size), config.head_dim)
    model = LlamaShard(config, folder, rank, collective, torch.float32)
    return model, PagedKVPool(shape, torch.float32, memory)


def run_ranks(folder: Path, size: int, chunks: list[list[Span]]) -> torch.Tensor:
    """Logits of the last chunk, computed by `size` ranks as threads."""
    barrier, box = threading.Barrier(size), [None] * size
    results: list[torch.Tensor] = [torch.empty(0)] * size

    def rank(number: int) -> None:
        collective = ThreadCollective(number, size, barrier, box) if size > 1 else Collective()
        model, pool = shard(folder, number, collective)
        for spans in chunks:
            results[number] = model.forward(spans, pool)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(torch.equal(results[0], r) for r in results)
    return results[0]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_logits_equal_transformers_at_page_borders(tiny: Path, truth: Truth, tp: int, length: int) -> None:
    prompt, _ = truth.decided(length, 1)
    # Pages out of order: positions must follow the page table, not the pool.
    logits = run_ranks(tiny, tp, [[Span(prompt, 0, [7, 2, 11, 0])]])
    torch.testing.assert_close(logits[0], truth.logits(prompt)[-1], atol=1e-4, rtol=1e-5)


def test_chunked_prefill_and_mixed_batch_equal_one_whole_prefill(tiny: Path, truth: Truth) -> None:
    first, _ = truth.decided(29, 1)
    second, _ = truth.decided(10, 1)
    pages_a, pages_b = [3, 9, 1, 14], [0, 5]
    logits = run_ranks(
        tiny,
        2,
        [
            [Span(first[:16], 0, pages_a)],
            [Span(first[16:24], 16, pages_a), Span(second[:9], 0, pages_b)],
            [Span(second[9:], 9, pages_b), Span(first[24:], 24, pages_a)],
        ],
    )
    torch.testing.assert_close(logits[0], truth.logits(second)[-1], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(logits[1], truth.logits(first)[-1], atol=1e-4, rtol=1e-5)


def test_replicated_kv_heads_are_equal_on_neighbouring_ranks(tiny: Path) -> None:
    config = load_config(tiny)
    assert config.kv_heads == 2
    slices = [config.kv_slice(r, 4) for r in range(4)]
    assert [(s.first, s.count, s.total) for s in slices] == [(0, 1, 2), (0, 1, 2), (1, 1, 2), (1, 1, 2)]
    assert [(s.first, s.count) for s in (config.kv_slice(0, 1), config.kv_slice(1, 2))] == [(0, 2), (1, 1)]


def test_layout_tells_shapes_kinds_and_emulation_of_the_real_tensors(tiny: Path) -> None:
    _, pool = shard(tiny, 0, Collective(), memory="mixed")
    layout = pool.layout(0, 1)
    # 8 tokens x 2 heads x 16 dims x 4 bytes
    assert {r.item_bytes for r in layout.regions} == {1024} and {r.items for r in layout.regions} == {16}
    assert [r.memory.value for r in layout.regions if r.kind.value == "K" and r.memory] == [
        "VRAM",
        "DRAM",
        "VRAM",
        "DRAM",
    ]
    assert layout.emulated_vram and layout.page_tokens == PAGE and layout.kv_dtype == "float32"
    assert len({r.address for r in layout.regions}) == 8 and layout.stale_reason is None


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_rope_scaling_equals_transformers(tiny: Path, rope: dict[str, object], scaling: RopeScaling) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = replace(load_config(tiny), rope_scaling=scaling)
    theirs = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters={"rope_theta": 10000.0, **rope}
    )
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1, 1, 1), torch.arange(100)[None])
    ours = rope_table(config, torch.float32)
    torch.testing.assert_close(ours[0][:100], cos[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1][:100], sin[0], atol=1e-5, rtol=1e-5)


def test_sharded_checkpoint_gives_the_tensors_of_the_single_file(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(str(tiny / "model.safetensors"))
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({k: weights[k] for k in keys}, str(tmp_path / file))
    index = {"weight_map": {k: f for f, keys in parts.items() for k in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    name = "model.layers.1.self_attn.k_proj.weight"
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read(name, (32, 64), torch.float32, rows=(16, 16)), weights[name][16:])
        assert torch.equal(checkpoint.read(name, (32, 64), torch.float32, columns=(8, 4)), weights[name][:, 8:12])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(SetupError, match=r"names files that are not there: b\.safetensors"), open_checkpoint(tmp_path):
        pass


def test_tiny_model_is_the_same_for_a_seed_and_fits_a_config_map(tmp_path: Path) -> None:
    size = make_tiny_model(tmp_path / "a", seed=5)
    make_tiny_model(tmp_path / "b", seed=5)
    make_tiny_model(tmp_path / "c", seed=6)
    read = {n: (tmp_path / n / "model.safetensors").read_bytes() for n in "abc"}
    assert read["a"] == read["b"] != read["c"]
    assert size < 900 * 1024


def test_greedy_answers_of_the_tiny_model_are_varied(truth: Truth) -> None:
    tokens, _ = truth.greedy(list(range(10, 30)), 48)
    assert len(set(tokens)) > 24 and 1 not in tokens
