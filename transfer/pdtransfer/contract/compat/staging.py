"""Family G: SGLang's staging buffer (SGLANG_DISAGG_STAGING_BUFFER)."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.parallelism import TP, geometry_of, sizes
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, attention_tp, columns, every, known
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import GeometryError, ModelGeometry, dtype_bytes

G = Family()
LARGEST_DEFAULT_CHUNK = 16384
"""Tokens of a prefill chunk that SGLang chooses on its largest GPUs; 2048 on its smallest."""
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


MIB = 1 << 20


@G.rule(
    "G4",
    "Staging takes device memory, used or not",
    columns(nixl=Outcome.WARN, mooncake=Outcome.WARN),
    needs=("staging_buffer", "staging_pool_mb", "geometry", *TP),
    change=_UNSET + " where both roles have the same attention TP",
    engines=SGLANG_ONLY,
)
def g4(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    on = _staged(p, d)
    if not on or geometry_of(p, d).latent:
        return None  # MLA is G1's.
    ring = known(d.staging_pool_mb, d, "staging_pool_mb") if d in on else None
    takes = [f"decode {ring} MiB"] if ring is not None else []
    takes += ["prefill four chunks"] if p in on else []
    what = f"{sizes(p, d)} with the staging buffer on: it takes {' and '.join(takes)} of device memory a rank"
    if attention_tp(p) == attention_tp(d):
        return Hit(what, consequence="Nothing is staged at equal TP.")
    return Hit(what, outcome=Outcome.FINE)


@G.rule(
    "G5",
    "Staging on both sides",
    columns(nixl=Outcome.WARN, mooncake=Outcome.WARN),
    needs=("staging_buffer", "geometry", *TP),
    change="set SGLANG_DISAGG_STAGING_BUFFER on both roles, or on neither",
    engines=SGLANG_ONLY,
)
def g5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = known(p.staging_buffer, p, "staging_buffer"), known(d.staging_buffer, d, "staging_buffer")
    if ours == theirs or attention_tp(p) == attention_tp(d) or geometry_of(p, d).latent:
        return None
    return Hit(
        f"the staging buffer is {_on(ours)} on prefill and {_on(theirs)} on decode, with {sizes(p, d)}",
        consequence="Slices are sent token by token, as without it.",
    )


def _on(flag: bool) -> str:
    return "on" if flag else "off"


@G.rule(
    "G6",
    "A prefill chunk fits into decode's staging ring",
    columns(nixl=Outcome.REQ, mooncake=Outcome.REQ),
    needs=("staging_buffer", "staging_pool_mb", "geometry", "chunked_prefill_size", "page_size", "kv_dtype", *TP),
    change="set SGLANG_DISAGG_STAGING_POOL_SIZE_MB on decode to at least the chunk, or a smaller "
    "--chunked-prefill-size on prefill",
    engines=SGLANG_ONLY,
)
def g6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if not (known(p.staging_buffer, p, "staging_buffer") and known(d.staging_buffer, d, "staging_buffer")):
        return None
    geometry = geometry_of(p, d)
    if attention_tp(p) == attention_tp(d) or geometry.latent:
        return None
    ring = known(d.staging_pool_mb, d, "staging_pool_mb") * MIB
    dtype = known(d.kv_dtype, d, "kv_dtype")
    # The engine's own chunk size follows its GPU's memory.
    tokens = LARGEST_DEFAULT_CHUNK if p.chunked_prefill_size is None else p.chunked_prefill_size
    chunk = chunk_bytes(geometry, tokens, attention_tp(p), attention_tp(d), dtype)
    if chunk is None or chunk <= ring:
        return None
    known(p.chunked_prefill_size, p, "chunked_prefill_size")
    return Hit(
        f"a chunk of {p.chunked_prefill_size} tokens is {-(-chunk // MIB)} MiB for a decode rank, and its staging ring "
        f"has {ring // MIB} MiB"
    )


def chunk_bytes(geometry: ModelGeometry, tokens: int, prefill_tp: int, decode_tp: int, kv_dtype: str) -> int | None:
    """KV of one chunk in one decode rank's ring: tokens x 2 x layers x heads written x bytes of a head. Every prefill
    rank that writes has room of its own, also where several hold the same head. None where the dtype has no whole
    bytes. (common/staging_buffer.py compute_staging_layout, which takes V as wide as K)"""
    heads = max(1, geometry.kv_heads // decode_tp)
    if prefill_tp > decode_tp:
        heads = prefill_tp // decode_tp * max(1, geometry.kv_heads // prefill_tp)
    try:
        head = geometry.head_dim * dtype_bytes(kv_dtype, geometry.dtype)
    except GeometryError:
        return None
    return tokens * 2 * len(geometry.kv_layers) * heads * head
