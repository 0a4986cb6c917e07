"""Family F: KV received into host memory (HiSparse, host receive), and what cards say of memory."""

from __future__ import annotations

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, EngineType, MemoryKind
from pdtransfer.contract.compat.parallelism import geometry_of, sizes
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
from pdtransfer.contract.effective.hicache import receives_on_host
from pdtransfer.contract.facts import HostKVMode, RoleFacts, draft_kv_algorithm
from pdtransfer.contract.families import is_deepseek_v4, is_dsa, is_minimax_m3

F = Family()
HISPARSE_KERNELS = {
    "bfloat16": ("flashmla_sparse",),
    "auto": ("flashmla_sparse",),
    "fp8_e4m3": ("flashmla_kv", "flashinfer_sparse_mla"),
}
"""DSA kernels that read HiSparse's rows on NVIDIA GPUs, by KV dtype."""
_ASK_AGAIN = "nothing to set: the card is asked for again, and after the limit the pod is recycled"


def receives_into_host(d: RoleFacts) -> bool:
    """True when decode registers host memory as a destination."""
    if d.memory_kinds is not None:
        return MemoryKind.DRAM in d.memory_kinds
    return d.host_kv is not HostKVMode.OFF


@F.rule(
    "F1",
    "Host KV is decode's",
    every(Outcome.START),
    needs=("host_kv",),
    change="set hostKV on decode only",
)
def f1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.host_kv is not HostKVMode.HOST_RECEIVE:
        return None
    return Hit("prefill has host KV mode HostReceive, and only decode receives")


@F.rule(
    "F2",
    "Host receive needs a backend that writes into host memory",
    columns(nixl=Outcome.START, mooncake=Outcome.START),
    needs=("host_kv",),
    change="use transfer.backend PDCluster, or hostKV mode Off",
    engines=SGLANG_ONLY,
)
def f2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.host_kv is not HostKVMode.HOST_RECEIVE:
        return None
    return Hit(f"decode has host KV mode HostReceive, and backend {backend.value} has no host destination")


@F.rule(
    "F3",
    "Unequal TP into host memory",
    columns(nixl=Outcome.PDEAD),
    needs=("geometry", "tensor_parallel", "memory_kinds"),
    change="use equal TP, or transfer.backend PDCluster, which moves it",
)
def f3(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if attention_tp(p) == attention_tp(d) or not receives_into_host(d) or geometry_of(p, d).latent:
        return None
    return Hit(
        f"{sizes(p, d)}, and decode receives into host memory (DRAM)",
        consequence="SGLang raises NotImplementedError (direct-to-host) in the prefill rank's bootstrap thread: "
        "the thread dies, /health stays green, every later request to that rank hangs 300 s.",
    )


@F.rule(
    "F4",
    "HiSparse with draft KV or DeepSeek-V4",
    columns(Outcome.DCRASH, Outcome.DCRASH),
    needs=("host_kv", "speculative_algorithm", "geometry"),
    change="drop speculation on decode, or use transfer.backend Mooncake",
    engines=SGLANG_ONLY,
)
def f4(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.host_kv is not HostKVMode.HISPARSE:
        return None
    if is_deepseek_v4(p.geometry or d.geometry):
        return Hit(f"decode has host KV mode HiSparse with DeepSeek-V4 on backend {backend.value}")
    algorithm = known(d.speculative_algorithm, d, "speculative_algorithm")
    if not draft_kv_algorithm(algorithm):
        return None
    return Hit(f"decode has host KV mode HiSparse and draft KV ({algorithm}) on backend {backend.value}")


@F.rule(
    "F5",
    "What HiSparse needs",
    every(Outcome.START),
    needs=(
        "host_kv",
        "geometry",
        "decode_radix_cache",
        "mixed_chunk",
        "kv_dtype",
        "dsa_backend",
        "speculative_algorithm",
    ),
    change="use HiSparse with a DSA model (DeepSeek-V3.2, GLM-5), DeepSeek-V4 or MiniMax-M3, without mixed chunks and "
    "without decode's radix cache",
    engines=SGLANG_ONLY,
)
def f5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.host_kv is not HostKVMode.HISPARSE:
        return None
    if d.mixed_chunk:
        return Hit("decode has host KV mode HiSparse and mixed chunks on")
    if d.decode_radix_cache:
        return Hit("decode has host KV mode HiSparse and its radix cache on")
    if hit := _drafts(d):
        return hit
    geometry = geometry_of(p, d)
    dsa, m3 = is_dsa(geometry), is_minimax_m3(geometry)
    if not dsa and not m3 and not is_deepseek_v4(geometry):
        kind = geometry.architecture or geometry.model_type or "of another type"
        return Hit(
            f"decode has host KV mode HiSparse, and the model is {kind} with {geometry.attention.value} attention"
        )
    tp = attention_tp(d)
    if m3 and geometry.heads_per_rank(tp) != 1:
        return Hit(
            f"HiSparse with MiniMax-M3 needs one KV head per rank; decode attention TP {tp} leaves "
            f"{geometry.heads_per_rank(tp)}"
        )
    return _kernels(d) if dsa else None


def _drafts(d: RoleFacts) -> Hit | None:
    """HiSparse goes with chains of drafts, not with trees or with lengths that change."""
    if not d.speculative_algorithm or d.speculative_algorithm.upper() == "NONE":
        return None
    if (d.speculative_eagle_topk or 1) != 1:
        return Hit(
            f"decode has host KV mode HiSparse and --speculative-eagle-topk {d.speculative_eagle_topk}",
            change="set --speculative-eagle-topk 1",
        )
    if d.speculative_adaptive:
        return Hit("decode has host KV mode HiSparse and --speculative-adaptive", change="drop --speculative-adaptive")
    return None


def _kernels(d: RoleFacts) -> Hit | None:
    """KV dtype and DSA kernels of decode; on ROCm all kernels there are read it."""
    if d.kv_dtype is not None and d.kv_dtype not in HISPARSE_KERNELS:
        return Hit(
            f"decode has host KV mode HiSparse and KV dtype {d.kv_dtype}",
            change="set kvCache.dtype to bfloat16 or fp8_e4m3",
        )
    if d.accelerator is Accelerator.ROCM or d.dsa_backend is None or d.kv_dtype is None:
        return None
    allowed = HISPARSE_KERNELS[d.kv_dtype]
    if d.dsa_backend in allowed:
        return None
    return Hit(
        f"decode has host KV mode HiSparse, KV dtype {d.kv_dtype} and DSA kernels {d.dsa_backend}",
        change=f"set --dsa-decode-backend {' or '.join(allowed)} on decode, or leave it out",
    )


@F.rule(
    "F6",
    "No HiSparse on prefill",
    every(Outcome.WRONG),
    needs=("host_kv",),
    change="set HiSparse on decode only",
)
def f6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.host_kv is not HostKVMode.HISPARSE:
        return None
    return Hit("prefill has host KV mode HiSparse, whose page numbers the send path does not translate")


@F.rule(
    "F7",
    "Every registered region names its memory kind",
    columns(Outcome.HANG, Outcome.PDEAD, Outcome.PDEAD),
    needs=("memory_kinds", "regions_without_memory_kind"),
    change=_ASK_AGAIN,
)
def f7(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if facts.segments == 0:
            continue  # F8 says so.
        missing = facts.regions_without_memory_kind
        if missing or (facts.memory_kinds is not None and not facts.memory_kinds):
            count = f"{missing} of {facts.segments} KV regions" if missing else "the KV regions"
            return Hit(
                f"{facts.role.value}: {count} name no memory kind (VRAM or DRAM); the registration is "
                "incomplete or stale",
                consequence="SGLang stops with 'Missing NIXL destination KV memory kind' and every later request "
                "to that rank hangs; PDCluster never wires such a card.",
            )
    for facts in (p, d):
        known(facts.memory_kinds, facts, "memory_kinds")
    return None


@F.rule(
    "F8",
    "Both sides registered KV memory",
    columns(Outcome.HANG, Outcome.PDEAD, Outcome.PDEAD),
    needs=("segments",),
    change=_ASK_AGAIN,
)
def f8(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if facts.segments == 0:
            other = d if facts is p else p
            return Hit(
                f"{facts.role.value} registered no KV memory segments ({other.role.value}: "
                f"{'not known' if other.segments is None else other.segments})",
                consequence="There is nothing to write from or to ('NIXL KV transfer has no KV memory segments').",
            )
    for facts in (p, d):
        known(facts.segments, facts, "segments")
    return None


@F.rule(
    "F9",
    "Decode really registered the host memory that was asked for",
    every(Outcome.REQ),
    needs=("host_kv", "memory_kinds"),
    change="check that the engine was started with host KV, and that its version has it",
)
def f9(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    # Mooncake's HiSparse lands on the device first: there DRAM is never registered.
    if d.host_kv is HostKVMode.OFF or (d.host_kv is HostKVMode.HISPARSE and backend is Backend.MOONCAKE):
        return None
    kinds = known(d.memory_kinds, d, "memory_kinds")
    if MemoryKind.DRAM in kinds or not kinds:
        return None
    return Hit(
        f"decode was asked for host KV mode {d.host_kv.value} and registered only "
        f"{', '.join(sorted(k.value for k in kinds))}",
        outcome=Outcome.WARN if d.engine is EngineType.REFERENCE else None,
    )


@F.rule(
    "F10",
    "What host receive needs",
    every(Outcome.START),
    needs=("host_kv", "host_receive_threshold", "retraction_backup", "geometry"),
    change="use host receive with plain or sliding-window GQA models, and leave the retraction backup to the engine",
    engines=SGLANG_ONLY,
)
def f10(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    threshold = d.host_receive_threshold
    if threshold is not None and not 0 <= threshold <= 1:
        return Hit(f"decode has host receive threshold {threshold:g}, which is not between 0 and 1")
    if not receives_on_host(d):
        return None
    if d.host_kv is HostKVMode.HISPARSE:
        return Hit("decode has host receive and HiSparse on")
    if d.retraction_backup == "cpu_tensor":
        return Hit("decode receives into host memory and has retraction backup cpu_tensor, which has no pool")
    geometry = geometry_of(p, d)
    if geometry.latent or is_minimax_m3(geometry):
        return Hit(f"decode receives into host memory, and the model has {geometry.attention.value} attention")
    if geometry.linear_layers:
        return Hit(f"decode receives into host memory, and {len(geometry.linear_layers)} layers keep recurrent state")
    return None
