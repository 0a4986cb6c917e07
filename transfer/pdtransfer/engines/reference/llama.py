"""Forward pass of one TP rank's shard of a Llama model over the paged KV pool.

Column-parallel q, k, v, gate, up and (where the vocabulary divides) lm_head; row-parallel o and down
followed by an all-reduce. A step is one flat batch of tokens of several requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from pdtransfer.engines.reference.checkpoint import Checkpoint, open_checkpoint
from pdtransfer.engines.reference.collective import Collective
from pdtransfer.engines.reference.kv_pool import PagedKVPool
from pdtransfer.engines.reference.model_config import LlamaConfig


@dataclass(frozen=True)
class Layer:
    """Weights of one layer's shard; biases are None where the model has none."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class Span:
    """Tokens of one request in a step: positions start .. start+count-1 over its page table."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


class LlamaShard:
    """One rank's weights and forward pass."""

    def __init__(
        self, config: LlamaConfig, folder: Path, rank: int, collective: Collective, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.rank = rank
        self.dtype = dtype
        self.collective = collective
        tp = collective.size
        self.q_heads = config.heads // tp
        self.kv = config.kv_slice(rank, tp)
        self.vocab_split = config.vocab % tp == 0 and tp > 1
        with open_checkpoint(folder) as checkpoint:
            self._load(checkpoint, tp)
        self.cos, self.sin = rope_table(config, dtype)

    def _load(self, checkpoint: Checkpoint, tp: int) -> None:
        c, dtype = self.config, self.dtype
        self.embedding = checkpoint.read("model.embed_tokens.weight", (c.vocab, c.hidden), dtype)
        self.final_norm = checkpoint.read("model.norm.weight", (c.hidden,), dtype)
        vocab = c.vocab // tp
        rows = (self.rank * vocab, vocab) if self.vocab_split else None
        if c.tied:
            self.head = self.embedding[rows[0] : rows[0] + rows[1]] if rows else self.embedding
        else:
            self.head = checkpoint.read("lm_head.weight", (c.vocab, c.hidden), dtype, rows=rows)
        self.layers = [self._load_layer(checkpoint, f"model.layers.{i}.", tp) for i in range(c.layers)]

    def _load_layer(self, checkpoint: Checkpoint, prefix: str, tp: int) -> Layer:
        c, dtype, d = self.config, self.dtype, self.config.head_dim
        q = (self.rank * self.q_heads * d, self.q_heads * d)
        kv = (self.kv.first * d, self.kv.count * d)
        ff = (self.rank * (c.intermediate // tp), c.intermediate // tp)

        def joined(parts: Sequence[tuple[str, int, tuple[int, int]]], what: str) -> torch.Tensor:
            shape = (c.hidden,) if what == "weight" else ()
            return torch.cat(
                [
                    checkpoint.read(f"{prefix}{name}.{what}", (size, *shape), dtype, rows=rows)
                    for name, size, rows in parts
                ]
            )

        attention = [
            ("self_attn.q_proj", c.heads * d, q),
            ("self_attn.k_proj", c.kv_heads * d, kv),
            ("self_attn.v_proj", c.kv_heads * d, kv),
        ]
        mlp = [("mlp.gate_proj", c.intermediate, ff), ("mlp.up_proj", c.intermediate, ff)]
        return Layer(
            input_norm=checkpoint.read(f"{prefix}input_layernorm.weight", (c.hidden,), dtype),
            post_norm=checkpoint.read(f"{prefix}post_attention_layernorm.weight", (c.hidden,), dtype),
            qkv=joined(attention, "weight"),
            qkv_bias=joined(attention, "bias") if c.attention_bias else None,
            out=checkpoint.read(f"{prefix}self_attn.o_proj.weight", (c.hidden, c.heads * d), dtype, columns=q),
            out_bias=self._row_bias(checkpoint, f"{prefix}self_attn.o_proj.bias", c.attention_bias),
            gate_up=joined(mlp, "weight"),
            gate_up_bias=joined(mlp, "bias") if c.mlp_bias else None,
            down=checkpoint.read(f"{prefix}mlp.down_proj.weight", (c.hidden, c.intermediate), dtype, columns=ff),
            down_bias=self._row_bias(checkpoint, f"{prefix}mlp.down_proj.bias", c.mlp_bias),
        )

    def _row_bias(self, checkpoint: Checkpoint, name: str, wanted: bool) -> torch.Tensor | None:
        # The partial sums are added up over the ranks: the bias may be in one of them only.
        return checkpoint.read(name, (self.config.hidden,), self.dtype) if wanted and self.rank == 0 else None

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], pool: PagedKVPool) -> torch.Tensor:
        """Run the spans, store their KV in the pool; logits [spans, vocab] of each span's last token."""
        positions = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) for s in spans])
        tables = [torch.tensor(s.pages, dtype=torch.int64) for s in spans]
        slots = torch.cat([pool.slots(s.pages, s.start, len(s.tokens)) for s in spans])
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = embedding(torch.tensor([t for s in spans for t in s.tokens]), self.embedding)
        for index, layer in enumerate(self.layers):
            normed = rms_norm(x, layer.input_norm, self.config.rms_eps)
            attended = self._attention(index, layer, normed, spans, tables, slots, (cos, sin), pool)
            x = x + self.collective.all_reduce(linear(attended, layer.out, layer.out_bias))
            normed = rms_norm(x, layer.post_norm, self.config.rms_eps)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = x + self.collective.all_reduce(linear(silu(gate) * up, layer.down, layer.down_bias))
        last = torch.tensor([len(s.tokens) for s in spans]).cumsum(0) - 1
        logits = linear(rms_norm(x[last], self.final_norm, self.config.rms_eps), self.head)
        return (self.collective.all_gather(logits) if self.vocab_split else logits).float()

    def _attention(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        spans: Sequence[Span],
        tables: Sequence[torch.Tensor],
        slots: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        pool: PagedKVPool,
    ) -> torch.Tensor:
        d, kv = self.config.head_dim, self.kv.count
        q, k, v = torch.split(linear(x, layer.qkv, layer.qkv_bias), [self.q_heads * d, kv * d, kv * d], dim=-1)
        q = rotate(q.view(-1, self.q_heads, d), *rope)
        k = rotate(k.view(-1, kv, d), *rope)
        pool.write(index, slots, k, v.view(-1, kv, d))
        out, at = [], 0
        for span, table in zip(spans, tables, strict=True):
            count = len(span.tokens)
            keys, values = pool.read(index, table, span.start + count)
            out.append(attend(q[at : at + count], keys.to(self.dtype), values.to(self.dtype), span.start))
            at += count
        return torch.cat(out)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Causal attention of q [n, heads, d] at positions start.. over k, v [start+n, kv heads, d];
    answers [n, heads*d]. Query head h reads KV head h // (heads / kv heads)."""
    count, heads, d = q.shape
    group = heads // k.shape[1]
    k = k.repeat_interleave(group, dim=1).transpose(0, 1)
    v = v.repeat_interleave(group, dim=1).transpose(0, 1)
    mask = None
    if count > 1:
        mask = torch.ones(count, start + count, dtype=torch.bool).tril(diagonal=start)
    found = scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask)
    return found.transpose(0, 1).reshape(count, heads * d)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm, computed in float32 as the published model does."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [tokens, heads, d]; the halves of the head are the pairs."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def rope_table(config: LlamaConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [max_position, head_dim] (frequencies theta**(-2i/d), twice)."""
    d = config.head_dim
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        frequency = frequency / scaling.factor
    elif scaling is not None:
        wavelength = 2 * math.pi / frequency
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = ((scaling.original_max_position / wavelength - low) / (high - low)).clamp(0, 1)
        frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    angles = torch.outer(torch.arange(config.max_position).float(), frequency)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
