"""Family D, continued: features of SGLang that a disaggregated server refuses or loses."""

from __future__ import annotations

from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat.parallelism import geometry_of
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, every, known
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.families import is_minimax_m3

D = Family()
MINICPM_BACKENDS = frozenset({"minicpm_flashattn", "minicpm_flashinfer"})


@D.rule(
    "D6",
    "How recurrent state is cached",
    every(Outcome.START),
    needs=("linear_replayssm", "linear_replayssm_spec", "mamba_cache_strategy", "page_size", "geometry"),
    change="drop the flag; --mamba-radix-cache-strategy extra_buffer takes pages of any size",
    engines=SGLANG_ONLY,
)
def d6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        who = facts.role.value
        if known(facts.linear_replayssm, facts, "linear_replayssm"):
            return Hit(f"{who} has --enable-linear-replayssm")
        if facts.role is Role.PREFILL and known(facts.linear_replayssm_spec, facts, "linear_replayssm_spec"):
            return Hit(f"{who} has --enable-linear-replayssm-spec, which is decode's")
        strategy = known(facts.mamba_cache_strategy, facts, "mamba_cache_strategy")
        if strategy not in ("no_buffer", "extra_buffer_lazy") or not _has_radix(facts):
            continue
        # A model without recurrent state refuses the lazy strategy as well, and does not look at the other.
        if strategy == "extra_buffer_lazy":
            return Hit(f"{who} has --mamba-radix-cache-strategy extra_buffer_lazy")
        if not geometry_of(p, d).linear_layers:
            continue
        page = known(facts.page_size, facts, "page_size")
        if page > 1:
            return Hit(f"{who} has --mamba-radix-cache-strategy no_buffer and page size {page}")
    return None


def _has_radix(facts: RoleFacts) -> bool:
    """Whether a role keeps a prefix cache: prefill by default, decode where it is asked for."""
    if facts.role is Role.DECODE:
        return known(facts.decode_radix_cache, facts, "decode_radix_cache")
    return not facts.disable_radix_cache


@D.rule(
    "D7",
    "Features that exclude disaggregation",
    every(Outcome.START),
    needs=(
        "lmcache",
        "watermark",
        "response_store",
        "pdmux",
        "dllm_algorithm",
        "geometry",
        "attention_backend",
        "minicpm_force_dense",
        "speculative_algorithm",
    ),
    change="drop it on both roles",
    engines=SGLANG_ONLY,
)
def d7(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        who = facts.role.value
        flags = {
            "lmcache": "--enable-lmcache",
            "watermark": "--enable-watermark",
            "response_store": "--enable-response-store",
            "pdmux": "--enable-pdmux",
        }
        for name, flag in flags.items():
            if known(getattr(facts, name), facts, name):
                return Hit(f"{who} has {flag}")
    diffusion = [known(f.dllm_algorithm, f, "dllm_algorithm") for f in (p, d)]
    if any(diffusion):
        alone = "SGLang sets --disaggregation-mode null by itself: such a server computes every request on its own"
        return Hit(
            f"--dllm-algorithm (diffusion LLM) is {diffusion[0]!r} on prefill and {diffusion[1]!r} on decode",
            outcome=Outcome.NORM if all(diffusion) else Outcome.REQ,
            consequence=f"{alone}, and no KV is exchanged."
            if all(diffusion)
            else f"{alone}; the other one waits for it until its timeout.",
        )
    geometry = geometry_of(p, d)
    for facts in (p, d):
        if geometry.minicpm_sparse and not facts.minicpm_force_dense and _sparse_kernels(facts):
            return Hit(
                f"{facts.role.value} runs MiniCPM's sparse attention",
                change="set a dense --attention-backend (or SGLANG_MINICPM_FORCE_DENSE=1) on both roles",
            )
        if is_minimax_m3(geometry) and facts.speculative_algorithm == "DFLASH" and facts.kv_dtype == "nvfp4":
            return Hit(f"{facts.role.value} runs MiniMax-M3.1 in NVFP4 with DFLASH")
    return None


def _sparse_kernels(facts: RoleFacts) -> bool:
    """Whether MiniCPM's sparse kernels are asked for, or chosen because nothing else is."""
    names = (facts.attention_backend, facts.prefill_attention_backend, facts.decode_attention_backend)
    if None in names:
        known(facts.attention_backend, facts, "attention_backend")
    return not any(names) or any(name in MINICPM_BACKENDS for name in names)
