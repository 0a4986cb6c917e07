"""Family A: tensor and data parallelism of the two sides."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.rule import (
    Family,
    Hit,
    Outcome,
    attention_tp,
    columns,
    every,
    known,
)
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import ModelGeometry

A = Family()
TP = ("tensor_parallel", "attention_data_parallel", "context_parallel")


def geometry_of(p: RoleFacts, d: RoleFacts) -> ModelGeometry:
    """The model's geometry, from whichever side knows it (rule B7 compares the two)."""
    return known(p.geometry or d.geometry, p, "geometry")


def sizes(p: RoleFacts, d: RoleFacts) -> str:
    """Both attention-TP sizes, as every message of this family names them."""
    return f"prefill attention TP {attention_tp(p)}, decode attention TP {attention_tp(d)}"


@A.rule(
    "A1",
    "Data parallelism is attention DP, or replicas of their own",
    every(Outcome.NORM),
    needs=("data_parallel", "dp_attention_flag"),
    change="set attentionDataParallelSize (for attention DP) or replicas (for copies) instead of --dp-size",
)
def a1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if facts.data_parallel == 1:
            continue
        if facts.dp_attention_flag:
            return Hit(
                f"{facts.role.value} is given --dp-size {facts.data_parallel} --enable-dp-attention",
                consequence=f"The engine rewrites it to attention DP {facts.attention_dp}, "
                f"attention TP {attention_tp(facts)}.",
            )
        return Hit(
            f"{facts.role.value} has data parallel size {facts.data_parallel} without DP attention: "
            f"{facts.data_parallel} whole copies inside one server",
            consequence="SGLang tells the copies apart by number; a request whose two halves name different copies "
            "fails.",
            outcome=Outcome.WARN,
        )
    return None


@A.rule(
    "A2",
    "TP divides into attention DP and CP",
    every(Outcome.START),
    needs=("tensor_parallel", "attention_data_parallel", "context_parallel", "data_parallel"),
    change="make tensorParallelSize a multiple of attentionDataParallelSize (times context parallel size), "
    "and set only one of the two data-parallel sizes",
)
def a2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if facts.attention_tp is None:
            return Hit(
                f"{facts.role.value} has TP {facts.tensor_parallel}, attention DP {facts.attention_dp} and "
                f"CP {facts.context_parallel}: {facts.tensor_parallel} is not divisible by "
                f"{facts.attention_dp * facts.context_parallel}"
            )
        if facts.data_parallel > 1 and facts.attention_data_parallel > 1:
            return Hit(
                f"{facts.role.value} sets both data parallel size {facts.data_parallel} and attention data "
                f"parallel size {facts.attention_data_parallel}"
            )
    return None


@A.rule(
    "A3",
    "One side's attention TP divides the other's",
    every(Outcome.REQ),
    needs=TP,
    change="choose TP sizes where one is a multiple of the other",
)
def a3(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ptp, dtp = attention_tp(p), attention_tp(d)
    if ptp % dtp == 0 or dtp % ptp == 0:
        return None
    problem = f"{sizes(p, d)}: neither divides the other"
    if backend is Backend.PDCLUSTER:
        return Hit(problem, consequence="Ranks' head slices can not be mapped; the pair is refused.")
    if dtp > ptp:
        return Hit(problem, consequence="Decode ranks ask for prefill ranks that do not exist; requests fail.")
    return Hit(problem, outcome=Outcome.HANG, consequence="Surplus prefill ranks never bootstrap: 300 s timeout.")


@A.rule(
    "A4",
    "Unequal TP with MLA",
    {},
    needs=("geometry", *TP),
    change="",
)
def a4(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    return None  # Every rank holds the same latent row; one copy is sent. Fine with every backend.


@A.rule(
    "A5",
    "Unequal TP with GQA is sent per token",
    columns(nixl=Outcome.WARN, mooncake=Outcome.WARN),
    needs=("geometry", *TP),
    change="use equal TP, SGLang's staging buffer, or transfer.backend PDCluster",
)
def a5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if attention_tp(p) == attention_tp(d) or geometry_of(p, d).latent:
        return None
    if p.staging_buffer and d.staging_buffer:
        return None
    return Hit(
        f"{sizes(p, d)} with {geometry_of(p, d).kv_heads} KV heads",
        consequence="SGLang moves one slice per token; its performance is not guaranteed.",
    )


@A.rule(
    "A6",
    "More prefill ranks than KV heads, and still more decode ranks",
    columns(nixl=Outcome.PDEAD),
    needs=("geometry", *TP),
    change="use prefill TP <= KV heads, decode TP <= prefill TP, or transfer.backend PDCluster",
)
def a6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ptp, dtp = attention_tp(p), attention_tp(d)
    if dtp <= ptp or (geometry := geometry_of(p, d)).latent or ptp <= geometry.kv_heads:
        return None
    return Hit(f"{sizes(p, d)}, {geometry.kv_heads} KV heads: the number of head groups rounds to 0")


@A.rule(
    "A7",
    "Unequal TP where K and V differ in head dim",
    columns(nixl=Outcome.PDEAD, mooncake=Outcome.WRONG),
    needs=("geometry", *TP),
    change="use equal TP, or transfer.backend PDCluster",
)
def a7(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if attention_tp(p) == attention_tp(d) or (geometry := geometry_of(p, d)).latent:
        return None
    if geometry.value_dim == geometry.head_dim:
        return None
    # V's items are taken to be as long as K's. Where they are shorter the slices run past the last region
    # (NIXL refuses the list), where they are longer all of them lie inside it.
    inside = geometry.value_dim > geometry.head_dim
    return Hit(
        f"{sizes(p, d)}; K heads are {geometry.head_dim} wide, V heads {geometry.value_dim}, and one slice "
        "width is used for both",
        outcome=Outcome.WRONG if inside else None,
    )


def slice_heads(prefill_tp: int, decode_tp: int, kv_heads: int) -> int:
    """Heads in one slice of a token that one prefill rank sends to one decode rank: min(hs, hd)."""
    return min(max(1, kv_heads // prefill_tp), max(1, kv_heads // decode_tp))


@A.rule(
    "A21",
    "One prefill serves decode groups of one slice width",
    columns(nixl=Outcome.REQ),
    needs=("decode_tp_sizes", "geometry", *TP),
    change="give all decode groups of one prefill group one attention TP, or use transfer.backend PDCluster",
)
def a21(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    """Who knows one pair only does not know this: other decode groups on the same prefill are another pair's."""
    ptp, dtp = attention_tp(p), attention_tp(d)
    if p.decode_tp_sizes is None and dtp == ptp:
        return None  # Another group that makes trouble makes it in its own pair too.
    if p.decode_tp_sizes == frozenset({dtp}) or (geometry := geometry_of(p, d)).latent:
        return None
    served = known(p.decode_tp_sizes, p, "decode_tp_sizes") | {dtp}
    # Equal TP goes another way; what the first unequal peer needs is kept for all later ones.
    widths = {tp: slice_heads(ptp, tp, geometry.kv_heads) for tp in sorted(served) if tp != ptp}
    if len(set(widths.values())) < 2:
        return None
    shown = ", ".join(f"{n} heads for decode attention TP {tp}" for tp, n in widths.items())
    return Hit(
        f"prefill attention TP {ptp} serves decode groups of several sizes, with slices of {shown}; the list "
        "of source slices is made for the first one and used for all",
        consequence="Requests of the later groups fail, or their KV is silently wrong.",
    )


@A.rule(
    "A22",
    "KV heads split over the ranks of each side",
    every(Outcome.START),
    needs=("geometry", *TP),
    change="choose a TP size that divides the KV heads or is a multiple of them",
)
def a22(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    geometry = geometry_of(p, d)
    if geometry.latent:
        return None
    for facts in (p, d):
        tp = attention_tp(facts)
        if geometry.kv_heads % tp and tp % geometry.kv_heads:
            return Hit(f"{facts.role.value} attention TP {tp} and {geometry.kv_heads} KV heads: neither divides")
    return None
