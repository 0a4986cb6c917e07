"""Family A: tensor, pipeline, data and context parallelism of the two sides."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.rule import (
    SGLANG_ONLY,
    Family,
    Hit,
    Outcome,
    attention_tp,
    columns,
    every,
    known,
)
from pdtransfer.contract.facts import RoleFacts, draft_kv_algorithm
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
    columns(Outcome.REQ, Outcome.NORM, Outcome.NORM),
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
                outcome=Outcome.NORM,
                consequence=f"The engine rewrites it to attention DP {facts.attention_dp}, "
                f"attention TP {attention_tp(facts)}.",
            )
        return Hit(
            f"{facts.role.value} has data parallel size {facts.data_parallel} without DP attention: "
            f"{facts.data_parallel} whole copies inside one server, whose ranks carry the same coordinates",
            consequence="Two ranks would stand under one key; requests reach the wrong copy."
            if backend is Backend.PDCLUSTER
            else "SGLang tells the copies apart by number; a request whose two halves name different copies fails.",
            outcome=None if backend is Backend.PDCLUSTER else Outcome.WARN,
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
    columns(nixl=Outcome.PDEAD),
    needs=("geometry", *TP),
    change="use equal TP, or transfer.backend PDCluster",
)
def a7(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if attention_tp(p) == attention_tp(d) or (geometry := geometry_of(p, d)).latent:
        return None
    if geometry.value_dim == geometry.head_dim:
        return None
    return Hit(
        f"{sizes(p, d)}; K heads are {geometry.head_dim} wide, V heads {geometry.value_dim}, and one slice "
        "width is used for both"
    )


@A.rule(
    "A8",
    "Decode's pipeline stages are 1 or prefill's",
    columns(nixl=Outcome.DCRASH, mooncake=Outcome.DCRASH),
    needs=("pipeline_parallel",),
    change="set decode pipelineParallelSize to 1 (or to prefill's), or transfer.backend PDCluster",
)
def a8(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.pipeline_parallel in (1, p.pipeline_parallel):
        return None
    return Hit(f"prefill has {p.pipeline_parallel} pipeline stages, decode {d.pipeline_parallel}")


@A.rule(
    "A9",
    "Prefill stages into one decode stage, GQA at equal TP",
    columns(nixl=Outcome.PDEAD),
    needs=("geometry", "pipeline_parallel", *TP),
    change="set prefill pipelineParallelSize to 1, or transfer.backend PDCluster (layers are mapped by id)",
)
def a9(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.pipeline_parallel == 1 or d.pipeline_parallel != 1 or attention_tp(p) != attention_tp(d):
        return None
    geometry = geometry_of(p, d)
    if geometry.latent or geometry.linear_layers:
        return None
    return Hit(
        f"prefill has {p.pipeline_parallel} pipeline stages, decode 1, both attention TP {attention_tp(p)}, "
        "and the backend does not send layer ids for GQA"
    )


@A.rule(
    "A10",
    "Prefill stages into one decode stage, GQA at unequal TP",
    columns(nixl=Outcome.WRONG, mooncake=Outcome.WRONG),
    needs=("geometry", "pipeline_parallel", *TP),
    change="use a pipelineParallelSize that divides the layers, 1, or transfer.backend PDCluster",
)
def a10(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.pipeline_parallel == 1 or d.pipeline_parallel != 1 or attention_tp(p) == attention_tp(d):
        return None
    geometry = geometry_of(p, d)
    if geometry.latent:
        return None
    total = geometry.layers
    base, extra = divmod(total, p.pipeline_parallel)
    # The V regions are looked for at n * (L // n) for a stage of n layers.
    stages = {base, base + 1} if extra else {base}
    wrong = [n for n in sorted(stages) if n == 0 or n * (total // n) != total]
    if not wrong:
        return None
    offset = wrong[0] * (total // wrong[0]) if wrong[0] else 0
    return Hit(
        f"{total} layers over {p.pipeline_parallel} prefill stages: a stage of {wrong[0]} layers makes the "
        f"backend look for V at region {offset} where decode has it at {total}"
    )


@A.rule(
    "A11",
    "Decode pipeline stages exclude speculation",
    every(Outcome.START),
    needs=("pipeline_parallel", "speculative_algorithm"),
    change="drop speculation or set decode pipelineParallelSize to 1",
    engines=SGLANG_ONLY,
)
def a11(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.pipeline_parallel == 1:
        return None
    algorithm = known(d.speculative_algorithm, d, "speculative_algorithm")
    if not draft_kv_algorithm(algorithm):
        return None
    return Hit(f"decode has {d.pipeline_parallel} pipeline stages and speculative algorithm {algorithm}")


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
