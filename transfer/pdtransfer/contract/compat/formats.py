"""Family B, continued: how the rows of a page are laid out, where flags and GPU generations decide it."""

from __future__ import annotations

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.parallelism import geometry_of
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, columns, every, generation, known
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.families import is_deepseek_v4, is_deepseek_v41, is_dsa
from pdtransfer.contract.geometry import ModelGeometry, is_fp8

B = Family()
RAW_ROWS = frozenset({"trtllm", "tilelang"})
RAW_ROWS_ROCM = RAW_ROWS | {"triton", "aiter"}
"""DSA kernels that read fp8 rows without scales (KV cache configurator of SGLang)."""


def dsa_auto_dtype(accelerator: Accelerator) -> str:
    """The KV dtype that 'auto' means for DSA on NVIDIA GPUs: fp8 from compute capability 10 on."""
    return "fp8_e4m3" if accelerator.major >= 10 else "bfloat16"


@B.rule(
    "B5",
    "DSA's KV dtype 'auto' is the same on both GPU generations",
    columns(Outcome.REQ, Outcome.DCRASH, Outcome.DCRASH),
    needs=("geometry", "kv_dtype", "accelerator"),
    change="set kvCache.dtype to fp8_e4m3 or bfloat16",
    engines=SGLANG_ONLY,
)
def b5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    dtypes = known(p.kv_dtype, p, "kv_dtype"), known(d.kv_dtype, d, "kv_dtype")
    if not is_dsa(geometry_of(p, d)):
        return None
    if dtypes != ("auto", "auto") and (p.accelerator is None or d.accelerator is None):
        return None  # At least one side is explicit: B3 compares what stands there.
    found = known(p.accelerator, p, "accelerator"), known(d.accelerator, d, "accelerator")
    if not all(a.nvidia for a in found):
        return None
    ours, theirs = (dsa_auto_dtype(a) for a in found)
    # What 'auto' became may stand there already.
    if ours == theirs or dtypes[0] not in ("auto", ours) or dtypes[1] not in ("auto", theirs):
        return None
    return Hit(
        f"prefill runs on {found[0].value}, where 'auto' means {ours} for DSA, decode on {found[1].value}, where it "
        f"means {theirs}",
        consequence="Pages can not be mapped; the pair is refused." if backend is Backend.PDCLUSTER else "",
    )


@B.rule(
    "B6",
    "DSA rows in fp8 are laid out alike",
    columns(Outcome.REQ, Outcome.WRONG, Outcome.WRONG),
    needs=("geometry", "kv_dtype", "dsa_backend", "host_kv"),
    change="set kernels of one row layout: --dsa-prefill-backend on prefill, --dsa-decode-backend on decode",
    engines=SGLANG_ONLY,
)
def b6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if not is_dsa(geometry_of(p, d)) or not is_fp8(known(p.kv_dtype, p, "kv_dtype")):
        return None
    if p.dsa_backend is None and d.dsa_backend is None and p.host_kv is d.host_kv:
        return None  # Both take the default of their GPU; cards show where these differ.
    narrow = raw_rows(p), raw_rows(d)
    if narrow[0] == narrow[1]:
        return None
    rows = {True: "raw 576 bytes", False: "656 bytes"}
    return Hit(
        f"prefill's DSA kernels are {p.dsa_backend} (rows of {rows[narrow[0]]}), decode's {d.dsa_backend} "
        f"(rows of {rows[narrow[1]]})",
        # SGLang refuses only a source row that is wider than the destination's.
        outcome=Outcome.PDEAD if backend is Backend.NIXL and narrow[1] else None,
        consequence="Rows can not be mapped; the handshake refuses the peer." if backend is Backend.PDCLUSTER else "",
    )


def raw_rows(facts: RoleFacts) -> bool:
    """True when a role's DSA kernels keep fp8 rows without scales."""
    kernels = RAW_ROWS_ROCM if facts.accelerator is Accelerator.ROCM else RAW_ROWS
    return known(facts.dsa_backend, facts, "dsa_backend") in kernels


@B.rule(
    "B10",
    "Pages are laid out token by token",
    every(Outcome.START),
    needs=("hnd_kv_cache", "geometry"),
    change="unset SGLANG_USE_HND_KVCACHE",
    engines=SGLANG_ONLY,
)
def b10(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if known(facts.hnd_kv_cache, facts, "hnd_kv_cache") and not geometry_of(p, d).latent:
            return Hit(f"{facts.role.value} has SGLANG_USE_HND_KVCACHE set: its pages are laid out head by head")
    return None


@B.rule(
    "B11",
    "DeepSeek-V4's pages are laid out alike",
    columns(Outcome.REQ, Outcome.DCRASH, Outcome.DCRASH),
    needs=("geometry", "dsv4_attention_backend", "dsv4_kv_layout", "dsv4_compressed_kv_layout", "accelerator"),
    change="set --dsv4-attn-backend, SGLANG_DSV4_KV_LAYOUT and SGLANG_DSV4_COMPRESSED_KV_LAYOUT alike on both roles",
    engines=SGLANG_ONLY,
)
def b11(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    geometry = geometry_of(p, d)
    if not is_deepseek_v4(geometry):
        return None
    for facts in (p, d):
        if facts.dsv4_attention_backend == "trtllm":
            return Hit(
                f"{facts.role.value} has --dsv4-attn-backend trtllm, which SGLang does not run disaggregated",
                outcome=Outcome.START,
                change="use another --dsv4-attn-backend",
            )
    ours, theirs = v4_layout(p, geometry), v4_layout(d, geometry)
    if ours == theirs:
        return None
    return Hit(
        f"DeepSeek-V4's KV layout is {ours} on prefill and {theirs} on decode",
        consequence="Pages can not be mapped; the pair is refused." if backend is Backend.PDCLUSTER else "",
    )


def v4_layout(facts: RoleFacts, geometry: ModelGeometry) -> str:
    """`main/compressed` layout of a role, as SGLang's select_dsv4_kv_layout chooses it.

    NeedsFact where the GPU decides and is not known."""
    backend = known(facts.dsv4_attention_backend, facts, "dsv4_attention_backend")
    asked = known(facts.dsv4_kv_layout, facts, "dsv4_kv_layout").lower()
    option = known(facts.dsv4_compressed_kv_layout, facts, "dsv4_compressed_kv_layout").lower()
    mega = backend == "flashmla_mega"
    if backend == "auto" and is_deepseek_v41(geometry) and asked in ("", "auto", "v41", "v41_new"):
        sm100 = generation(facts) is Accelerator.SM100
        mega = sm100 and known(facts.kv_dtype, facts, "kv_dtype") in ("auto", "fp8_e4m3")
    main = "v41" if mega and asked != "v41_new" else asked or "v4"
    if main == "auto":
        main = "v41" if generation(facts) is Accelerator.SM100 else "v4"
    # V4 pairs with fp8 only, so that its compressed cache has one layout.
    return f"{main}/{'fp8' if main == 'v4' else option}"
