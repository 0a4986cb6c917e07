"""Family A, continued: context parallelism of prefill (CP) and of decode (DCP)."""

from __future__ import annotations

from pdtransfer.contract.base import Backend, EngineType
from pdtransfer.contract.compat.parallelism import geometry_of
from pdtransfer.contract.compat.pipeline import stage_kv_layers
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, columns, every, known
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.families import is_dsa
from pdtransfer.contract.geometry import GeometryError

A = Family()


@A.rule(
    "A12",
    "Decode has no context parallelism",
    columns(Outcome.REQ, Outcome.DCRASH, Outcome.DCRASH),
    needs=("context_parallel",),
    change="remove context parallelism from decode",
)
def a12(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.context_parallel == 1:
        return None
    return Hit(f"decode has context parallel size {d.context_parallel}")


@A.rule(
    "A13",
    "Which context-parallel prefill ranks send",
    columns(Outcome.START, Outcome.HANG, Outcome.HANG),
    needs=("context_parallel", "all_cp_ranks_transfer", "geometry"),
    change="set SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER alike on both roles; with transfer.backend "
    "PDCluster leave it unset on prefill",
)
def a13(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.context_parallel == 1:
        return None
    geometry = p.geometry or d.geometry
    hybrid = geometry is not None and geometry.latent and bool(geometry.linear_layers)
    if backend is Backend.PDCLUSTER:
        if not hybrid and not known(p.all_cp_ranks_transfer, p, "all_cp_ranks_transfer"):
            return None
        why = "SGLang lets all of them send for MLA beside linear attention" if hybrid else "all of them are to send"
        return Hit(
            f"prefill has context parallel size {p.context_parallel}, and {why}; PDCluster sends from the first one",
            change="use prefill context parallel size 1, or transfer.backend Mooncake" if hybrid else "",
        )
    if p.dsa_cache_layer_split or p.kv_cache_sharding:
        return None  # All ranks send, and decode reads that from prefill's answer.
    if hybrid:
        return None  # Both sides switch it on by themselves.
    ours = known(p.all_cp_ranks_transfer, p, "all_cp_ranks_transfer")
    theirs = known(d.all_cp_ranks_transfer, d, "all_cp_ranks_transfer")
    if ours == theirs:
        return None
    return Hit(
        f"prefill has context parallel size {p.context_parallel}; "
        f"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER is {ours} there and {theirs} on decode"
    )


@A.rule(
    "A14",
    "Decode context parallelism alike, or 1 on prefill",
    columns(Outcome.REQ, Outcome.PDEAD, Outcome.PDEAD),
    needs=("dcp_size", "geometry"),
    change="set the same --dcp-size on both roles, or (with MLA) 1 on prefill; with transfer.backend PDCluster "
    "leave it at 1",
)
def a14(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    sizes = f"prefill DCP size is {p.dcp_size}, decode DCP size is {d.dcp_size}"
    if backend is Backend.PDCLUSTER:
        if p.dcp_size == d.dcp_size == 1:
            return None
        if d.dcp_size > 1 and d.engine is EngineType.SGLANG:
            return Hit(f"{sizes}, and SGLang gives decode DCP to backends it knows by name only", outcome=Outcome.START)
        return Hit(f"{sizes}, which PDCluster's mover does not do yet", consequence="The pair is refused.")
    if p.dcp_size == d.dcp_size or (p.dcp_size == 1 and geometry_of(p, d).latent):
        return None
    return Hit(sizes)


@A.rule(
    "A15",
    "What decode context parallelism needs",
    columns(nixl=Outcome.DCRASH, mooncake=Outcome.DCRASH),
    needs=("dcp_size", "geometry", "context_parallel", "kv_cache_sharding"),
    change="use --dcp-size 1 on decode",
)
def a15(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.dcp_size == 1:
        return None
    if p.context_parallel > 1:
        return Hit(f"decode DCP size is {d.dcp_size}, prefill context parallel size {p.context_parallel}")
    if p.kv_cache_sharding:
        return Hit(f"decode DCP size is {d.dcp_size}, and prefill shards its KV cache (--enable-kv-cache-sharding)")
    geometry = geometry_of(p, d)
    if geometry.latent:
        return None
    return Hit(f"decode DCP size is {d.dcp_size}, and the model has {geometry.attention.value} attention, not MLA")


@A.rule(
    "A16",
    "Where decode context parallelism is possible",
    every(Outcome.START),
    needs=("dcp_size", "geometry"),
    change="use --dcp-size 1",
    engines=SGLANG_ONLY,
)
def a16(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if facts.dcp_size > 1 and facts.context_parallel > 1:
            return Hit(
                f"{facts.role.value} DCP size is {facts.dcp_size}, context parallel size {facts.context_parallel}"
            )
        if facts.dcp_size > 1 and is_dsa(geometry_of(p, d)):
            return Hit(f"{facts.role.value} DCP size is {facts.dcp_size}, and the model has DSA attention")
    if p.dcp_size == 1:
        return None
    return Hit(
        f"prefill DCP size is {p.dcp_size}",
        outcome=Outcome.WARN,
        consequence="SGLang runs it, and says that it costs communication and gains nothing on prefill.",
    )


@A.rule(
    "A17",
    "Memory on prefill for decode's context parallelism",
    columns(nixl=Outcome.WARN, mooncake=Outcome.WARN),
    needs=("dcp_size", "geometry", "chunked_prefill_size", "max_prefill_tokens", "page_size", "kv_dtype"),
    change="leave that much device memory free on prefill (lower --mem-fraction-static), or lower "
    "--chunked-prefill-size",
    engines=SGLANG_ONLY,
)
def a17(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.dcp_size == 1 or p.dcp_size != 1 or not geometry_of(p, d).latent:
        return None  # Rules A14 and A15 speak of the rest.
    size = pack_bytes(p, d)
    shown = "a buffer for each transfer thread" if size is None else f"{size} bytes ({size / 2**30:.2f} GiB)"
    return Hit(
        f"decode DCP size is {d.dcp_size}, prefill's is 1: each prefill rank takes {shown} of device memory when "
        "the first decode rank registers",
        consequence="Where the memory is gone by then, the prefill rank's bootstrap thread dies while /health "
        "stays green.",
    )


def pack_bytes(p: RoleFacts, d: RoleFacts) -> int | None:
    """Bytes of the buffers that A17 speaks of, on one prefill rank; None when something is not known.

    transfer threads x dcp x ceil(tokens / dcp) x bytes of a token over the largest stage's layers, where
    tokens is a prefill chunk in whole pages (SGLang's dcp_pack_buffer_bytes)."""
    geometry, page, dtype, queues = p.geometry or d.geometry, p.page_size, p.kv_dtype, p.transfer_queues
    chunk = p.chunked_prefill_size if p.chunked_prefill_size and p.chunked_prefill_size > 0 else p.max_prefill_tokens
    if geometry is None or page is None or dtype is None or queues is None or chunk is None:
        return None
    try:
        item = geometry.latent_item_bytes(page, dtype, raw_fp8=p.dsa_backend == "trtllm")
    except GeometryError:
        return None
    tokens = -(-chunk // page) * page
    layers = max(stage_kv_layers(geometry, p.pipeline_parallel))
    return queues * d.dcp_size * -(-tokens // d.dcp_size) * layers * (item // page)
