"""Family A, continued: context parallelism of prefill (CP) and of decode (DCP)."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.parallelism import geometry_of
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, columns, every, known
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import AttentionKind

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
    columns(Outcome.REQ, Outcome.HANG, Outcome.HANG),
    needs=("context_parallel", "all_cp_ranks_transfer"),
    change="set SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER alike on both roles; with transfer.backend "
    "PDCluster use prefill context parallel size 1",
)
def a13(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.context_parallel == 1:
        return None
    if backend is Backend.PDCLUSTER:
        return Hit(
            f"prefill has context parallel size {p.context_parallel}, which PDCluster's mover does not do yet",
            consequence="The pair is refused.",
        )
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
        return Hit(f"{sizes}, which PDCluster's mover does not do yet", consequence="The pair is refused.")
    if p.dcp_size == d.dcp_size or (p.dcp_size == 1 and geometry_of(p, d).latent):
        return None
    return Hit(sizes)


@A.rule(
    "A15",
    "What decode context parallelism needs",
    columns(nixl=Outcome.DCRASH, mooncake=Outcome.DCRASH),
    needs=("dcp_size", "geometry", "context_parallel"),
    change="use --dcp-size 1 on decode",
)
def a15(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.dcp_size == 1:
        return None
    if p.context_parallel > 1:
        return Hit(f"decode DCP size is {d.dcp_size}, prefill context parallel size {p.context_parallel}")
    geometry = geometry_of(p, d)
    if geometry.latent:
        return None
    return Hit(f"decode DCP size is {d.dcp_size}, and the model has {geometry.attention.value} attention, not MLA")


@A.rule(
    "A16",
    "No decode context parallelism with DSA",
    every(Outcome.START),
    needs=("dcp_size", "geometry"),
    change="use --dcp-size 1",
    engines=SGLANG_ONLY,
)
def a16(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if facts.dcp_size > 1 and geometry_of(p, d).attention is AttentionKind.DSA:
            return Hit(f"{facts.role.value} DCP size is {facts.dcp_size}, and the model has DSA attention")
        if facts.dcp_size > 1 and facts.context_parallel > 1:
            return Hit(
                f"{facts.role.value} DCP size is {facts.dcp_size}, context parallel size {facts.context_parallel}"
            )
    return None
