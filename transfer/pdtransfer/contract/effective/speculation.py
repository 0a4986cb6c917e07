"""What speculation brings along: names, widths of its trees, and what it switches off (rules C8, A11).

Formulas: sglang.srt.arg_groups.speculative_hook (aliases, _handle_ngram, _handle_eagle_family, _handle_dspark,
_handle_dflash, _auto_choose_speculative_params), and the model_overrides that set enable_multi_layer_eagle.
"""

from __future__ import annotations

from pdtransfer.contract.effective.models import drafts_in_layers
from pdtransfer.contract.effective.rewrite import Draft

_HOOK = "arg_groups/speculative_hook.py"
TREES = frozenset({"EAGLE", "EAGLE3", "STANDALONE"})
"""Algorithms whose width a user may set."""
CHAINS = frozenset({"DSPARK", "DFLASH"})
_WIDE = frozenset({"LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM"})
"""For these SGLang chooses trees of width 4, for all others chains."""
NGRAM_TOKENS = 12


def speculation(d: Draft) -> None:
    """NEXTN is another name of EAGLE. (A Gemma 4 assistant as draft makes it FROZEN_KV_MTP, which only
    the draft's config tells.)"""
    architecture = d.geometry.architecture if d.geometry else None
    if d.now.speculative_algorithm == "EAGLE" and drafts_in_layers(architecture or ""):
        d.quietly(multi_layer_eagle=True)
    algorithm = (d.now.speculative_algorithm or "").upper()
    if algorithm == "NEXTN":
        d.quietly(speculative_algorithm="EAGLE")
        algorithm = "EAGLE"
    if algorithm == "NGRAM":
        _ngram(d)
    elif algorithm in CHAINS:
        d.set("C8", "speculative_eagle_topk", 1, f"{algorithm} drafts chains", f"{_HOOK} _handle_{algorithm.lower()}")
    elif algorithm in TREES and d.unset("speculative_eagle_topk") and (architecture or algorithm == "STANDALONE"):
        wide = algorithm != "STANDALONE" and architecture in _WIDE and not d.now.speculative_adaptive
        why = f"{algorithm} with {architecture}"
        d.set("C8", "speculative_eagle_topk", 4 if wide else 1, why, f"{_HOOK} _auto_choose_speculative_params")


def _ngram(d: Draft) -> None:
    source = f"{_HOOK} _handle_ngram"
    if d.now.ngram_breadth is not None:
        why = "NGRAM has --speculative-ngram-max-bfs-breadth"
        d.set("C8", "speculative_eagle_topk", d.now.ngram_breadth, why, source)
    if d.now.mixed_chunk:
        d.set("C8", "mixed_chunk", False, "NGRAM has no mixed chunks", source)
    d.fill(draft_tokens=NGRAM_TOKENS)
