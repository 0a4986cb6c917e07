"""Family B: pages, dtypes and the model's shape on the two sides."""

from __future__ import annotations

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, EngineType
from pdtransfer.contract.compat.parallelism import geometry_of, sizes
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

B = Family()
_REFUSED = "Pages can not be mapped; the handshake refuses the peer."


@B.rule(
    "B1",
    "Page sizes are equal",
    columns(Outcome.REQ, Outcome.DCRASH, Outcome.DCRASH),
    needs=("page_size",),
    change="set kvCache.pageSize; if the engine rewrote it, choose a size (and an attention backend) that "
    "both roles keep",
)
def b1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = known(p.page_size, p, "page_size"), known(d.page_size, d, "page_size")
    if ours == theirs:
        return None
    return Hit(
        f"prefill page size is {ours}, decode page size is {theirs}",
        consequence=_REFUSED if backend is Backend.PDCLUSTER else "",
    )


@B.rule(
    "B2",
    "The engine keeps the page size that was set",
    every(Outcome.NORM),
    needs=("page_size", "page_size_requested"),
    change="set kvCache.pageSize to the value the attention backend uses, or pin the attention backend",
)
def b2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        asked, used = facts.page_size_requested, facts.page_size
        if facts.observed and asked is not None and used is not None and asked != used:
            return Hit(
                f"{facts.role.value} was given page size {asked} and uses {used}",
                consequence="The attention backend rewrote it.",
            )
    return None


@B.rule(
    "B3",
    "KV dtypes are equal, letter by letter",
    columns(Outcome.REQ, Outcome.DCRASH, Outcome.DCRASH),
    needs=("kv_dtype",),
    change="set kvCache.dtype, so that both roles get the same explicit value",
)
def b3(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours, theirs = known(p.kv_dtype, p, "kv_dtype"), known(d.kv_dtype, d, "kv_dtype")
    if ours == theirs:
        return None
    return Hit(
        f"prefill KV dtype is {ours!r}, decode KV dtype is {theirs!r}",
        consequence=_REFUSED if backend is Backend.PDCLUSTER else "",
    )


@B.rule(
    "B4",
    "KV dtype 'auto' means the same on both sides",
    columns(Outcome.REQ, Outcome.WRONG, Outcome.WRONG),
    needs=("kv_dtype", "model_dtype"),
    change="set kvCache.dtype to an explicit value, or --dtype alike on both roles",
)
def b4(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if known(p.kv_dtype, p, "kv_dtype") != "auto" or known(d.kv_dtype, d, "kv_dtype") != "auto":
        return None
    ours, theirs = known(p.model_dtype, p, "model_dtype"), known(d.model_dtype, d, "model_dtype")
    if ours == theirs:
        return None
    return Hit(
        f"KV dtype is 'auto' on both sides, and prefill's model dtype is {ours}, decode's {theirs}",
        consequence=_REFUSED if backend is Backend.PDCLUSTER else "",
    )


_LATENT_SHAPE = ("layers", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
_HEAD_SHAPE = ("layers", "kv_heads", "head_dim", "value_dim")
_PATTERNS = ("sliding_window_layers", "linear_layers", "kvless_layers")


def shape_difference(ours: ModelGeometry, theirs: ModelGeometry) -> tuple[str, object, object] | None:
    """First (field, ours, theirs) in which two shapes contradict each other; a dim that one of
    them does not know contradicts nothing."""
    if ours.latent != theirs.latent:
        return "attention", ours.attention.value, theirs.attention.value
    for name in (*(_LATENT_SHAPE if ours.latent else _HEAD_SHAPE), *_PATTERNS):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a is not None and b is not None and a != b:
            return name, a, b
    return None


@B.rule(
    "B7",
    "Both sides serve the same model",
    columns(Outcome.REQ, Outcome.WRONG, Outcome.WRONG),
    needs=("model_name", "model_revision", "geometry", "layers"),
    change="serve the same model and revision on both roles",
)
def b7(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    ours_refuses = "The fingerprints differ; the handshake refuses the peer." if backend is Backend.PDCLUSTER else ""
    for name in ("model_name", "model_revision", "layers"):
        ours, theirs = getattr(p, name), getattr(d, name)
        # A revision that neither side states can't be compared; one that only one states can't either.
        if ours is not None and theirs is not None and ours != theirs:
            problem = f"prefill {_plain(name)} is {_shown(ours)}, decode {_plain(name)} is {_shown(theirs)}"
            return Hit(problem, consequence=ours_refuses)
    if p.geometry and d.geometry and (found := shape_difference(p.geometry, d.geometry)):
        name, ours, theirs = found
        return Hit(
            f"prefill model has {name} {_shown(ours)}, decode model has {_shown(theirs)}",
            outcome=Outcome.PDEAD if backend is Backend.NIXL and _refused_by_nixl(p, d) else None,
            consequence=ours_refuses,
        )
    known(p.model_name, p, "model_name")
    known(d.model_name, d, "model_name")
    return None


def _refused_by_nixl(p: RoleFacts, d: RoleFacts) -> bool:
    """NIXL refuses fewer regions on decode, and at equal TP items that are longer on prefill; what is shorter, or
    more, it takes for right."""
    ours, theirs = p.geometry, d.geometry
    if ours is None or theirs is None or ours.latent != theirs.latent:
        return False
    if len(ours.kv_layers) > len(theirs.kv_layers):
        return True
    tp = attention_tp(p)
    if tp != attention_tp(d):
        return False
    return any(
        a.heads_per_rank(tp) * dims[0] > b.heads_per_rank(tp) * dims[1]
        for a, b, dims in (
            (ours, theirs, (ours.head_dim, theirs.head_dim)),
            (ours, theirs, (ours.value_dim, theirs.value_dim)),
        )
    )


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: object) -> str:
    """Long layer lists by their count and ends."""
    if isinstance(value, tuple) and len(value) > 6:
        return f"{len(value)} layers ({value[0]} .. {value[-1]})"
    return str(value)


@B.rule(
    "B8",
    "MXFP8 KV at equal TP only",
    columns(Outcome.REQ, Outcome.DCRASH, Outcome.DCRASH),
    needs=("kv_dtype", "geometry", "tensor_parallel"),
    change="use equal TP, or another KV dtype",
)
def b8(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if known(p.kv_dtype, p, "kv_dtype") != "mxfp8" or attention_tp(p) == attention_tp(d):
        return None
    if geometry_of(p, d).latent:
        return None
    return Hit(f"{sizes(p, d)} with KV dtype mxfp8, whose scales do not split by head")


@B.rule(
    "B9",
    "No 4-bit KV",
    every(Outcome.WRONG),
    needs=("kv_dtype", "accelerator", "attention_backend"),
    change="use an 8-bit or 16-bit kvCache.dtype",
)
def b9(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if facts.kv_dtype is None or "fp4" not in facts.kv_dtype.lower():
            continue
        what = f"{facts.role.value} KV dtype is {facts.kv_dtype!r}"
        backends = (facts.attention_backend, facts.prefill_attention_backend, facts.decode_attention_backend)
        if facts.kv_dtype == "nvfp4" and facts.accelerator is Accelerator.SM100 and "trtllm_mha" in backends:
            return Hit(f"{what} with the trtllm_mha attention backend on SM100", outcome=Outcome.START)
        return Hit(f"{what}: its scale tensors are not transferred")
    for facts in (p, d):
        known(facts.kv_dtype, facts, "kv_dtype")
    return None


@B.rule(
    "B12",
    "Prefill chunks are whole pages",
    every(Outcome.START),
    needs=("chunked_prefill_size", "page_size", "attention_data_parallel"),
    change="make --chunked-prefill-size (over attentionDataParallelSize) a multiple of kvCache.pageSize",
)
def b12(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    # -1 switches chunking off, and an engine's own default is a multiple of every page size.
    if p.chunked_prefill_size is None or p.chunked_prefill_size <= 0:
        return None
    page = known(p.page_size, p, "page_size")
    # SGLang gives each attention-DP rank its part of the chunk, and checks that part.
    parts = p.attention_dp if p.engine is EngineType.SGLANG else 1
    if (p.chunked_prefill_size // parts) % page == 0:
        return None
    if p.kv_cache_sharding:
        return None  # There it rounds the chunk up by itself.
    of = f" over {parts} attention-DP ranks" if parts > 1 else ""
    return Hit(f"prefill chunked_prefill_size is {p.chunked_prefill_size}{of}, its page size {page}")


@B.rule(
    "B13",
    "Fewer decode pages than prefill has",
    {},
    needs=(),
    change="",
)
def b13(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    # No setting brings it about: a request shows it. SGLang logs it and drops the tail (WRONG); PDCluster
    # fails that request by name before a byte moves.
    return None


@B.rule(
    "B14",
    "A prompt that prefill takes fits into decode",
    every(Outcome.WARN),
    needs=("context_length", "geometry", "max_total_tokens"),
    change="set --context-length alike on both roles (within decode's pool)",
)
def b14(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    geometry = p.geometry or d.geometry
    model = geometry.max_context if geometry else None
    ours, theirs = p.context_length or model, d.context_length or model
    what = "Decode answers 400 to a prompt that is longer than it takes, and the other side waits for its timeout."
    if ours != theirs:
        return Hit(
            f"prefill context length is {_limit(p, model)}, decode context length is {_limit(d, model)}",
            consequence=what,
        )
    if ours is not None and d.max_total_tokens is not None and d.max_total_tokens < ours:
        return Hit(f"prompts may have {ours} tokens, decode's KV pool holds {d.max_total_tokens}", consequence=what)
    return None


def _limit(facts: RoleFacts, model: int | None) -> str:
    return str(facts.context_length or f"the model's own ({model or 'not known here'})")
