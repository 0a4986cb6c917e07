"""Family C: speculative decoding on one or both sides."""

from __future__ import annotations

from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat.parallelism import geometry_of, sizes
from pdtransfer.contract.compat.pipeline import v_region
from pdtransfer.contract.compat.rule import (
    MOONCAKE_THREAD,
    SGLANG_ONLY,
    Family,
    Hit,
    Outcome,
    attention_tp,
    columns,
    every,
    known,
)
from pdtransfer.contract.effective.speculation import TREES
from pdtransfer.contract.facts import RoleFacts, draft_kv_algorithm
from pdtransfer.contract.families import is_deepseek_v41

C = Family()
_PAGED_EAGLE = frozenset({"flashinfer", "fa3", "triton"})
PAGED_TREES = {"NGRAM": frozenset({"flashinfer"})}
"""Attention backends that take trees of drafts over pages of more than one token; EAGLE's where none are named."""
RADIX_ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "DSPARK"})


def _draft(facts: RoleFacts) -> str:
    """Algorithm that stores draft KV on this side, '' for none."""
    return draft_kv_algorithm(known(facts.speculative_algorithm, facts, "speculative_algorithm"))


def _decode_only(p: RoleFacts, d: RoleFacts) -> bool:
    return not _draft(p) and bool(_draft(d))


@C.rule(
    "C1",
    "Draft KV on decode only",
    columns(pdcluster=Outcome.REQ),
    needs=("speculative_algorithm",),
    change="enable the same speculation on prefill, or (without draft KV there) use transfer.backend NIXL",
)
def c1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if not _decode_only(p, d):
        return None
    return Hit(
        f"decode speculates with {_draft(d)}, which stores draft KV; prefill with "
        f"{known(p.speculative_algorithm, p, 'speculative_algorithm') or 'none'}",
        consequence="The fingerprints differ; the handshake refuses the peer.",
    )


@C.rule(
    "C2",
    "Draft KV on prefill only",
    columns(Outcome.REQ, Outcome.PDEAD, Outcome.PDEAD),
    needs=("speculative_algorithm",),
    change="disable speculation on prefill, or enable the same on decode",
)
def c2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if not _draft(p) or _draft(d):
        return None
    geometry = p.geometry or d.geometry
    # Mooncake counts latent draft rows from the end of decode's list, which are then the model's own.
    over = backend is Backend.MOONCAKE and geometry is not None and geometry.latent
    return Hit(
        f"prefill speculates with {_draft(p)}, which stores draft KV; decode with "
        f"{known(d.speculative_algorithm, d, 'speculative_algorithm') or 'none'}, so it has fewer regions",
        outcome=Outcome.WRONG if over else None,
        consequence={
            Backend.PDCLUSTER: "The fingerprints differ; the handshake refuses the peer.",
            Backend.MOONCAKE: "" if over else MOONCAKE_THREAD,
        }.get(backend, ""),
    )


@C.rule(
    "C3",
    "A deep draft on decode only",
    columns(nixl=Outcome.WRONG, mooncake=Outcome.WRONG),
    needs=("speculative_algorithm", "geometry", "draft_layers", "tensor_parallel"),
    change="enable the same speculation on prefill, or use equal TP (transfer.backend NIXL)",
)
def c3(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    # NIXL pairs regions by position where TP is equal, and both pair those of linear models by layer id.
    if backend is Backend.NIXL and attention_tp(p) == attention_tp(d):
        return None
    if not _decode_only(p, d) or (g := geometry_of(p, d)).latent:
        return None
    if backend is Backend.MOONCAKE and g.linear_layers:
        return None
    total = len(g.kv_layers)
    # EAGLE drafts have one layer, MTP a few. STANDALONE drafts are models of their own, of any depth.
    if d.draft_layers is None and _draft(d) == "STANDALONE":
        known(d.draft_layers, d, "draft_layers")
    if not d.draft_layers or not total or v_region(total, total + d.draft_layers) == total:
        return None
    return Hit(
        f"{sizes(p, d)}; decode alone has {d.draft_layers} draft layers, the model {total} with KV: "
        "V is looked for at the wrong region"
    )


@C.rule(
    "C4",
    "Draft KV on decode only, with staging at unequal TP",
    columns(nixl=Outcome.WRONG),
    needs=("speculative_algorithm", "staging_buffer", "tensor_parallel"),
    change="enable the same speculation on prefill, or switch the staging buffer off",
    engines=SGLANG_ONLY,
)
def c4(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if attention_tp(p) == attention_tp(d) or not _decode_only(p, d):
        return None
    if not known(p.staging_buffer, p, "staging_buffer") or not known(d.staging_buffer, d, "staging_buffer"):
        return None
    return Hit(
        f"{sizes(p, d)}, staging on both sides, draft KV ({_draft(d)}) on decode only: layers are packed "
        "without and scattered with the draft's"
    )


@C.rule(
    "C5",
    "Both sides speculate alike",
    every(Outcome.WRONG),
    needs=("speculative_algorithm", "draft_model"),
    change="set the same speculative algorithm and draft model on both roles",
)
def c5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = _draft(p), _draft(d)
    if not ours or not theirs:
        return None
    if ours != theirs:
        return Hit(
            f"prefill speculates with {ours}, decode with {theirs}, and both store draft KV",
            outcome=Outcome.REQ if backend is Backend.PDCLUSTER else None,
            consequence="The fingerprints differ; the handshake refuses the peer."
            if backend is Backend.PDCLUSTER
            else "",
        )
    if p.draft_model is not None and d.draft_model is not None and p.draft_model != d.draft_model:
        return Hit(f"prefill's draft model is {p.draft_model}, decode's {d.draft_model}")
    return None


@C.rule(
    "C6",
    "DeepSeek-V4.1 and DSpark",
    columns(Outcome.START, Outcome.DCRASH, Outcome.DCRASH),
    needs=("geometry", "speculative_algorithm", "draft_tokens", "tensor_parallel", "context_parallel"),
    change="set the same DSPARK settings and TP on both roles with transfer.backend NIXL or Mooncake, or drop "
    "speculation on both",
    engines=SGLANG_ONLY,
)
def c6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if not is_deepseek_v41(geometry_of(p, d)):
        return None
    for facts in (p, d):
        if (against := _not_v41(facts, backend)) is not None:
            return Hit(f"{facts.role.value} runs DeepSeek-V4.1 with {against}", outcome=Outcome.START)
    ours, theirs = _draft(p), _draft(d)
    if not ours and not theirs:
        return None
    if ours != theirs:
        return Hit(f"DeepSeek-V4.1: prefill speculates with {ours or 'nothing'}, decode with {theirs or 'nothing'}")
    tokens = known(p.draft_tokens, p, "draft_tokens"), known(d.draft_tokens, d, "draft_tokens")
    if tokens[0] != tokens[1]:
        return Hit(f"DeepSeek-V4.1 with DSpark: prefill drafts {tokens[0]} tokens, decode {tokens[1]}")
    if attention_tp(p) == attention_tp(d) or (
        p.context_parallel > 1 and (attention_tp(p) * p.context_parallel == attention_tp(d))
    ):
        return None
    return Hit(f"DeepSeek-V4.1 with DSpark: {sizes(p, d)}, prefill context parallel size {p.context_parallel}")


def _not_v41(facts: RoleFacts, backend: Backend) -> str | None:
    """First setting of a role that SGLang refuses with DeepSeek-V4.1, alone or with DSpark."""
    if facts.pipeline_parallel > 1:
        return f"{facts.pipeline_parallel} pipeline stages"
    algorithm = known(facts.speculative_algorithm, facts, "speculative_algorithm")
    if not algorithm:
        return None
    if algorithm.upper() != "DSPARK":
        return f"speculative algorithm {algorithm}; it has DSPARK only"
    if backend is Backend.PDCLUSTER:
        return "DSpark and transfer backend PDCluster; only SGLang's Mooncake and NIXL take it"
    if facts.dcp_size > 1:
        return f"DSpark and DCP size {facts.dcp_size}"
    if facts.role is Role.DECODE and facts.context_parallel > 1:
        return f"DSpark and context parallel size {facts.context_parallel}"
    return None


@C.rule(
    "C7",
    "Decode's radix cache with this speculation",
    every(Outcome.START),
    needs=("decode_radix_cache", "speculative_algorithm"),
    change="use EAGLE, EAGLE3 or DSPARK, or drop --disaggregation-decode-enable-radix-cache",
    engines=SGLANG_ONLY,
)
def c7(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.decode_radix_cache is False or d.speculative_algorithm == "":
        return None
    name = known(d.speculative_algorithm, d, "speculative_algorithm")
    if (draft_kv_algorithm(name) or name) in RADIX_ALGORITHMS or not known(
        d.decode_radix_cache, d, "decode_radix_cache"
    ):
        return None
    return Hit(f"decode has its radix cache on and speculative algorithm {name}")


@C.rule(
    "C8",
    "Speculation in trees fits the pages and the attention backend",
    every(Outcome.START),
    needs=("speculative_algorithm", "speculative_eagle_topk", "page_size", "attention_backend", "data_parallel"),
    change="draft chains (--speculative-eagle-topk 1, for NGRAM --speculative-ngram-max-bfs-breadth 1), or set page "
    "size 1; NGRAM and STANDALONE need attentionDataParallelSize 1",
    engines=SGLANG_ONLY,
)
def c8(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    """Not in the table: read from arg_groups/speculative_hook.py, and held to it by a test that runs it."""
    for facts in (p, d):
        algorithm = known(facts.speculative_algorithm, facts, "speculative_algorithm").upper()
        if algorithm not in (*TREES, "NEXTN", "NGRAM"):
            continue
        what = f"{facts.role.value} speculates with {algorithm}"
        if algorithm in ("NGRAM", "STANDALONE") and facts.attention_dp > 1:
            return Hit(f"{what} and has attention data parallel size {facts.attention_dp}")
        if facts.speculative_eagle_topk == 1:
            continue
        base = known(facts.attention_backend, facts, "attention_backend")
        used = {facts.prefill_attention_backend or base, facts.decode_attention_backend or base}
        no_trees = algorithm != "NGRAM" and "trtllm_mha" in used
        paged = base in PAGED_TREES.get(algorithm, _PAGED_EAGLE)
        if not no_trees and (paged or known(facts.page_size, facts, "page_size") == 1):
            continue
        width = known(facts.speculative_eagle_topk, facts, "speculative_eagle_topk")
        if no_trees:
            return Hit(f"{what} in trees of width {width}, which attention backend trtllm_mha does not take")
        pages = f"pages of {facts.page_size} with attention backend {base}"
        return Hit(f"{what} in trees of width {width} over {pages}")
    return None
