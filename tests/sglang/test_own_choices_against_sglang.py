"""contract.effective against SGLang 0.5.23 for models with choices of their own, and for every architecture that SGLang
registers one for. Where the two disagree, SGLang is right."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from kit_configs import CONFIGS, LATENT, OWN_CHOICES, tiny_config
from kit_settings import RESOLVE_S, Case, as_facts, ask

from pdtransfer.contract.base import Role
from pdtransfer.contract.effective import effective
from pdtransfer.contract.effective.pools import POOL_OF_ITS_OWN
from pdtransfer.contract.families import MLA_ON_TRTLLM

GPUS = ("SM80", "SM90", "SM100", "SM120", "ROCm")
ROLES = tuple(Role)
pytestmark = pytest.mark.timeout(RESOLVE_S + 100)  # one process of SGLang's answers hundreds of cases
COMPARED = {
    "page_size": "page_size",
    "attention_backend": "attention_backend",
    "prefill_attention_backend": "prefill_attention_backend",
    "decode_attention_backend": "decode_attention_backend",
    "kv_dtype": "kv_cache_dtype",
    "disable_radix_cache": "disable_radix_cache",
    "multi_layer_eagle": "enable_multi_layer_eagle",
    "chunked_prefill_size": "chunked_prefill_size",
    "attention_data_parallel": "attn_dp_size",
    "data_parallel": "dp_size",
    "context_parallel": "attn_cp_size",
    "speculative_eagle_topk": "speculative_eagle_topk",
    "draft_tokens": "speculative_num_draft_tokens",
    "mixed_chunk": "enable_mixed_chunk",
}


def _cases() -> list[Case]:
    found = [Case(m, a, Role.DECODE) for m in OWN_CHOICES for a in GPUS]
    # Prefill differs where a prefix cache does.
    found += [Case(m, "SM100", Role.PREFILL) for m in OWN_CHOICES]
    for model, chip, side in itertools.product(OWN_CHOICES, ("SM90", "SM100"), ("prefill", "decode")):
        backend = "fa3" if model == "iquest_q1" else "flashinfer" if model == "moss_vl" else "triton"
        found.append(Case(model, chip, Role.DECODE, (f"--{side}-attention-backend", backend)))
    for model, page in itertools.product(("qwen4_exp", "qwen4_exp_qsa", "hrm_text", "kimi_k3"), ("1", "32", "128")):
        found += [Case(model, a, Role.PREFILL, ("--page-size", page)) for a in ("SM90", "SM100")]
    for strategy in ("no_buffer", "extra_buffer"):
        argv = ("--mamba-radix-cache-strategy", strategy)
        found += [Case(m, "SM100", r, argv) for m in ("qwen4_exp", "qwen4_exp_qsa") for r in ROLES]
    for backend in ("minicpm_flashattn", "minicpm_flashinfer"):
        dense = {"SGLANG_MINICPM_FORCE_DENSE": "1"}
        found += [Case("minicpm_dense", a, Role.DECODE, ("--attention-backend", backend), dense) for a in GPUS]
    found += [Case("diffusion_gemma", "SM100", Role.PREFILL, ("--attention-backend", "fa4"))]
    found += [Case("muse_spark", "SM90", r, ("--kv-cache-dtype", "bfloat16")) for r in ROLES]
    # Two variables of ROCm.
    found += [Case("qwen3_vl", "ROCm", r, (), {"SGLANG_USE_AITER_UNIFIED_ATTN": "1"}) for r in ROLES]
    found += [Case("llama", "ROCm", r, (), {"SGLANG_AITER_KV_CACHE_LAYOUT": "vectorized_5d"}) for r in ROLES]
    # Replicas inside one server (A1), and sizes that prefill's context parallelism sets by itself.
    found += [Case("llama", "SM90", r, ("--tp-size", "2", "--dp-size", "2")) for r in ROLES]
    for model, strategy in itertools.product(("deepseek_v3", "deepseek_v32", "deepseek_v4"), ("interleave", "zigzag")):
        base = ("--tp-size", "4", "--enable-prefill-cp", "--cp-strategy", strategy)
        for more in ((), ("--attn-dp-size", "2"), ("--dp-size", "2"), ("--attn-cp-size", "2")):
            found.append(Case(model, "SM90", Role.PREFILL, (*base, *more)))
    found.append(Case("llama", "SM90", Role.PREFILL, ("--tp-size", "4", "--attn-cp-size", "2")))
    # Speculation: widths and what it switches off.
    for more in ((), ("--speculative-ngram-max-bfs-breadth", "3"), ("--speculative-eagle-topk", "1")):
        argv = ("--speculative-algorithm", "NGRAM", "--enable-mixed-chunk", *more)
        found += [Case("llama", "SM90", r, argv) for r in ROLES]
    for algorithm, model in itertools.product(("EAGLE", "NEXTN", "EAGLE3"), ("deepseek_v3", "glm4_moe")):
        found.append(Case(model, "SM90", Role.DECODE, ("--speculative-algorithm", algorithm)))
    # Deterministic inference.
    plain = ("llama", "deepseek_v3", "qwen3", "gemma3")
    found += [
        Case(m, a, Role.PREFILL, ("--enable-deterministic-inference",)) for m in plain for a in ("SM80", *GPUS[1:4])
    ]
    return found


CASES = _cases()


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    return ask(CASES, [*COMPARED.values(), "dsa_prefill_backend", "dsa_decode_backend"])


def differences(case: Case, theirs: dict[str, Any]) -> list[str]:
    """Settings in which ours are not SGLang's. What we do not know is no difference."""
    facts = effective(as_facts(case)).facts
    found = []
    kernels = {"dsa_backend": f"dsa_{case.role.value}_backend"} if case.model.startswith("hy_v4") else {}
    for fact, setting in (COMPARED | kernels).items():
        mine, sglangs = getattr(facts, fact), theirs[setting]
        if mine is not None and (mine or None) != (sglangs or None):
            found.append(f"{fact}: ours {mine!r}, SGLang's {sglangs!r}")
    return found


def test_sglang_resolves_nearly_all_of_them(answers: dict[str, dict[str, Any]]) -> None:
    refused = {name: a["error"] for name, a in answers.items() if "error" in a}
    assert len(refused) < len(answers) // 8, json.dumps(refused, indent=1)
    # Every model is resolved somewhere.
    assert {c.model for c in CASES if "values" in answers[c.id]} >= set(OWN_CHOICES), refused


def test_their_settings_are_sglangs(answers: dict[str, dict[str, Any]]) -> None:
    wrong = {
        case.id: found
        for case in CASES
        if "values" in answers[case.id] and (found := differences(case, answers[case.id]["values"]))
    }
    assert not wrong, json.dumps(wrong, indent=1)


def test_their_page_size_is_known(answers: dict[str, dict[str, Any]]) -> None:
    unknown = [
        case.id for case in CASES if "values" in answers[case.id] and effective(as_facts(case)).facts.page_size is None
    ]
    assert not unknown, unknown


# Every architecture that SGLang registers a choice for


def _registered() -> list[str]:
    from sglang.srt.arg_groups import model_override_base, overrides

    by_predicate = {"Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"}
    named = {"WhisperForConditionalGeneration", "HrmTextForCausalLM"}
    return sorted(
        set(model_override_base._MODEL_OVERRIDE_FNS)
        | set(model_override_base.MODEL_OVERRIDES)
        | overrides._MAMBA_RADIX_CACHE_ARCHS
        | by_predicate
        | named
    )


def _plain(architecture: str) -> dict[str, Any]:
    """A config of this architecture with the fields that all kinds need: latent ones for the kinds that have them."""
    latent = LATENT if architecture in MLA_ON_TRTLLM or "Bailing" in architecture or "GigaChat" in architecture else {}
    layers = {"layer_types": ["full_attention"] * 2}
    return tiny_config(architecture, "deepseek_v3" if latent else "llama", **latent, **({} if latent else layers))


def test_no_architecture_with_a_choice_of_its_own_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names = _registered()
    assert len(names) > 80  # SGLang's registries are where they were
    for name in names:
        monkeypatch.setitem(CONFIGS, name, _plain(name))
    cases = [Case(name, chip, Role.DECODE) for name in names for chip in ("SM90", "SM100")]
    told = ask(cases, list(COMPARED.values()))
    resolved = [case for case in cases if "values" in told[case.id]]
    # What is left needs fields of its own, and has a case above or in test_effective_against_sglang.py.
    refused = sorted({case.model for case in cases} - {case.model for case in resolved})
    assert len(refused) < 12, {name: told[f"{name} on SM90, decode:"] for name in refused}
    wrong = {case.id: found for case in resolved if (found := differences(case, told[case.id]["values"]))}
    assert not wrong, json.dumps(wrong, indent=1)
    # The rest of the comparison would pass over what we do not know.
    unknown = [case.id for case in resolved if effective(as_facts(case)).facts.page_size is None]
    assert not unknown, unknown


# Which sliding layers have a pool of their own


def test_the_models_with_a_pool_for_sliding_layers_are_sglangs() -> None:
    from sglang.srt.configs.model_config import is_hybrid_swa_model

    class Text:
        """What SGLang looks at beside the name."""

        layer_types = ("sliding_attention",)
        sliding_window = 128

    names = {*_registered(), *POOL_OF_ITS_OWN} - {"DeepseekV41ForCausalLM"}  # SGLang renames it
    ours = {name for name in names if name in POOL_OF_ITS_OWN}
    assert ours == {name for name in names if is_hybrid_swa_model([name], Text())}


POOLS = [
    ("gpt_oss", (), True),
    ("gpt_oss", ("--disable-hybrid-swa-memory",), False),
    ("gemma4", (), True),
    ("gemma3", (), False),
    ("gemma3n", (), False),
    ("exaone4", (), False),
    ("granite_swa", (), True),
    ("step3p5", (), True),
    ("step3p5", ("--enable-hierarchical-cache",), False),
]


def test_sliding_layers_are_pooled_as_sglang_does_it() -> None:
    from sglang.srt.configs.model_config import is_hybrid_swa_model

    cases = [Case(model, "SM90", Role.PREFILL, argv) for model, argv, _ in POOLS]
    told = ask(cases, ["disable_hybrid_swa_memory"])
    for case, (model, _, expected) in zip(cases, POOLS, strict=True):
        asks_for_it = is_hybrid_swa_model(CONFIGS[model]["architectures"], None)
        assert (asks_for_it and not told[case.id]["values"]["disable_hybrid_swa_memory"]) is expected, case.id
        shape = effective(as_facts(case)).facts.geometry
        assert shape is not None and bool(shape.sliding_window_layers) is expected, case.id
