"""Family D: layers that hold state instead of paged KV, or beside it (sliding window, Mamba, linear
attention, sparse indexes). State travels by position; SGLang compares none of its types."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.parallelism import geometry_of, sizes
from pdtransfer.contract.compat.rule import MOONCAKE_THREAD, Family, Hit, Outcome, attention_tp, columns, known
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.families import is_minimax_m3

D = Family()


@D.rule(
    "D1",
    "Recurrent state (Mamba, linear attention) at unequal TP",
    columns(Outcome.REQ, Outcome.WARN, Outcome.WARN),
    needs=("geometry", "tensor_parallel"),
    change="use equal TP on both roles",
)
def d1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    linear = geometry_of(p, d).linear_layers
    if not linear or attention_tp(p) == attention_tp(d):
        return None
    return Hit(
        f"{sizes(p, d)}, and {len(linear)} of {geometry_of(p, d).layers} layers keep recurrent state (Mamba or linear "
        "attention)",
        consequence="PDCluster moves such state whole and does not slice it; the pair is refused."
        if backend is Backend.PDCLUSTER
        else "The state is sliced; tensors that every TP rank repeats make requests fail.",
    )


@D.rule(
    "D2",
    "Sliding-window layers at unequal TP",
    columns(Outcome.REQ, Outcome.HANG, Outcome.HANG),
    needs=("geometry", "tensor_parallel", "pipeline_parallel"),
    change="use equal TP on both roles, or transfer.backend PDCluster",
)
def d2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if attention_tp(p) == attention_tp(d):
        return None
    geometry = geometry_of(p, d)
    if geometry.latent or not geometry.sliding_window_layers:
        return None
    heads = geometry.swa_kv_heads or geometry.kv_heads
    what = f"{sizes(p, d)}, and {len(geometry.sliding_window_layers)} of {geometry.layers} layers keep a sliding window"
    if backend is Backend.PDCLUSTER:
        # Windows whose rows are as the full layers' are K and V of a page space of their own; others go whole.
        dims = geometry.swa_head_dim or geometry.head_dim, geometry.swa_v_head_dim or geometry.value_dim
        if heads == geometry.kv_heads and dims == (geometry.head_dim, geometry.value_dim):
            return None
        return Hit(
            f"{what} whose heads are not as the full layers' ({heads} of {dims[0]} and {dims[1]}, against "
            f"{geometry.kv_heads} of {geometry.head_dim} and {geometry.value_dim})",
            change="use equal TP on both roles",
            consequence="PDCluster moves such windows whole and does not slice them; the pair is refused.",
        )
    mooncake = backend is Backend.MOONCAKE
    against = None
    if p.pipeline_parallel > 1:
        against = f"{what}, with {p.pipeline_parallel} prefill stages"
    elif _uneven(heads, geometry.kv_heads, p, d):
        against = f"{what} of {heads} KV heads where the full layers have {geometry.kv_heads}"
    if against is not None:
        outcome = Outcome.PDEAD if mooncake else Outcome.REQ
        return Hit(against, outcome=outcome, consequence=MOONCAKE_THREAD if mooncake else "")
    return Hit(
        f"{what}, which is sent as state",
        consequence="SGLang 0.5.23 has code that slices the window, one block per token, but its users report that "
        "the first request fails or hangs while both servers stay healthy; nobody here has seen it work.",
    )


def _uneven(window: int, full: int, p: RoleFacts, d: RoleFacts) -> bool:
    """Whether a rank's share of the sliding layers' heads, over its share of the full layers', differs between the
    sides: SGLang cuts both by the full layers' count."""
    (w1, f1), (w2, f2) = [(max(1, window // attention_tp(r)), max(1, full // attention_tp(r))) for r in (p, d)]
    return w1 * f2 != w2 * f1


@D.rule(
    "D3",
    "State that every TP rank repeats, at unequal TP",
    columns(Outcome.REQ, Outcome.REQ, Outcome.PDEAD),
    needs=("geometry", "tensor_parallel", "kv_dtype"),
    change="use equal TP on both roles",
)
def d3(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    geometry = geometry_of(p, d)
    if geometry.latent:
        return None  # DeepSeek-V4's window ring and request state among them: one copy serves every rank.
    if attention_tp(p) == attention_tp(d):
        return None
    # Mooncake sends the index to every rank, since all hold the same.
    if geometry.compressed_index_heads is not None and backend is not Backend.MOONCAKE:
        return Hit(
            f"{sizes(p, d)}, and the model keeps a compressed sparse index (QSA) as state",
            consequence="The pair is refused." if backend is Backend.PDCLUSTER else "",
        )
    if "mxfp8" in (p.kv_dtype, d.kv_dtype):
        return Hit(
            f"{sizes(p, d)} with KV dtype mxfp8, whose block scales are state",
            consequence={Backend.MOONCAKE: MOONCAKE_THREAD, Backend.PDCLUSTER: "The pair is refused."}.get(backend, ""),
        )
    return None


@D.rule(
    "D4",
    "MiniMax-M3's sparse layers",
    columns(Outcome.REQ, Outcome.DCRASH, Outcome.DCRASH),
    needs=("geometry", "tensor_parallel", "pipeline_parallel"),
    change="use equal TP and pipelineParallelSize 1 on both roles",
)
def d4(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    geometry = geometry_of(p, d)
    if not is_minimax_m3(geometry):
        return None
    if geometry.index_values:
        return Hit(
            "MiniMax-M3 with an index value in its sparse layers, which SGLang does not run disaggregated",
            outcome=Outcome.START,
            change="serve a checkpoint whose sparse layers have index keys only (sparse_disable_index_value)",
        )
    if attention_tp(p) != attention_tp(d):
        return Hit(
            f"MiniMax-M3: {sizes(p, d)}; its pages are laid out head by head",
            consequence="The pair is refused." if backend is Backend.PDCLUSTER else "",
        )
    stages = max(p.pipeline_parallel, d.pipeline_parallel)
    if stages > 1:
        outcome = {Backend.NIXL: Outcome.REQ, Backend.MOONCAKE: Outcome.PDEAD}.get(backend)
        consequence = {Backend.PDCLUSTER: "The pair is refused.", Backend.MOONCAKE: MOONCAKE_THREAD}.get(backend, "")
        return Hit(f"MiniMax-M3 over {stages} pipeline stages", outcome=outcome, consequence=consequence)
    return None


@D.rule(
    "D5",
    "Recurrent state has one dtype",
    columns(Outcome.REQ, Outcome.REQ, Outcome.PDEAD),
    needs=("geometry", "ssm_dtype", "nixl_backend"),
    change="set --mamba-ssm-dtype alike on both roles",
)
def d5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    geometry = geometry_of(p, d)
    if not geometry.linear_layers or p.ssm_dtype == d.ssm_dtype:
        return None
    ours = known(p.ssm_dtype or geometry.ssm_dtype, p, "ssm_dtype")
    theirs = known(d.ssm_dtype or geometry.ssm_dtype, d, "ssm_dtype")
    if ours == theirs:
        return None
    what = f"recurrent state is {ours} on prefill and {theirs} on decode"
    if backend is Backend.PDCLUSTER:
        return Hit(what, consequence="Its items differ in size; the pair is refused.")
    if attention_tp(p) != attention_tp(d):
        return Hit(f"{what}, {sizes(p, d)}", outcome=Outcome.WRONG)
    if backend is Backend.MOONCAKE:
        return Hit(what, consequence=MOONCAKE_THREAD)
    # Only lists that are prepared beforehand compare the two sizes.
    prepared = p.nixl_backend in (None, "UCX") and p.pipeline_parallel == p.context_parallel == p.dcp_size == 1
    return Hit(what, outcome=None if prepared else Outcome.WRONG)
