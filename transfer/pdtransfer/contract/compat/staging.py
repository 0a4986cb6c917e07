"""Family G: SGLang's staging buffer (SGLANG_DISAGG_STAGING_BUFFER)."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.parallelism import geometry_of
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, columns, every, known
from pdtransfer.contract.facts import RoleFacts

G = Family()
_UNSET = "unset SGLANG_DISAGG_STAGING_BUFFER"


def _staged(p: RoleFacts, d: RoleFacts) -> list[RoleFacts]:
    """Roles with the staging buffer on. One that is known to be on decides without the other."""
    on = [facts for facts in (p, d) if facts.staging_buffer]
    if not on:
        for facts in (p, d):
            known(facts.staging_buffer, facts, "staging_buffer")
    return on


@G.rule(
    "G1",
    "No staging buffer with MLA",
    every(Outcome.START),
    needs=("staging_buffer", "geometry"),
    change=_UNSET,
    engines=SGLANG_ONLY,
)
def g1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    on = _staged(p, d)
    if not on or not (geometry := geometry_of(p, d)).latent:
        return None
    names = " and ".join(f.role.value for f in on)
    return Hit(f"{names}: staging buffer on, and the model has {geometry.attention.value} attention")


@G.rule(
    "G2",
    "Staging sends whole prefill chunks of one stage",
    every(Outcome.START),
    needs=("staging_buffer", "chunked_prefill_size", "page_size", "pipeline_parallel"),
    change="set prefill --chunked-prefill-size to a multiple of the page size and pipelineParallelSize to 1, "
    "or unset SGLANG_DISAGG_STAGING_BUFFER",
    engines=SGLANG_ONLY,
)
def g2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if not known(p.staging_buffer, p, "staging_buffer"):
        return None
    if backend is Backend.NIXL and p.pipeline_parallel != 1:
        return Hit(f"prefill has the staging buffer on and {p.pipeline_parallel} pipeline stages")
    size = p.chunked_prefill_size
    if size is None:
        return None
    if size <= 0:
        return Hit(f"prefill has the staging buffer on and chunked_prefill_size {size}")
    page = known(p.page_size, p, "page_size")
    if size % page:
        return Hit(f"prefill has the staging buffer on; chunked_prefill_size {size}, page size {page}")
    return None


@G.rule(
    "G3",
    "The staging buffer is of SGLang's own backends",
    columns(pdcluster=Outcome.START),
    needs=("staging_buffer",),
    change=_UNSET + "; PDCluster stages on its own",
    engines=SGLANG_ONLY,
)
def g3(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    on = _staged(p, d)
    if not on:
        return None
    names = " and ".join(f.role.value for f in on)
    return Hit(f"{names}: staging buffer on with transfer backend {backend.value}")
