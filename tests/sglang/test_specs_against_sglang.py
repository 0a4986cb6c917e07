"""Specs drawn at random: what SGLang refuses to start with, the operator has refused before a pod exists.

SGLang's word is that of its own resolution of the composed command lines, on a machine that it takes for a Hopper GPU.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kit_specs import ANSWER_S, MODELS, arguments, ask_sglang, make_models, manifest, spec_of

from pdoperator.api.validation import manifest_problems
from pdoperator.domain.facts import spec_facts
from pdoperator.domain.preflight import preflight
from pdtransfer.contract import compat
from pdtransfer.contract.base import Role
from pdtransfer.contract.geometry import from_hf_config

pytestmark = pytest.mark.timeout(ANSWER_S)
SEED, COUNT = 23, 100
HOPPER = {"nodeSelector": {"nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0"}}
LATER = {"F2", "F10"}
"""Rules about what SGLang refuses only when its KV pools exist, after its resolution."""
EXTRA: tuple[list[str], ...] = (
    [], [], ["--disable-radix-cache"], ["--enable-mixed-chunk"], ["--enable-priority-scheduling"], ["--dcp-size", "2"],
    ["--chunked-prefill-size", "2048"], ["--chunked-prefill-size", "1000"], ["--attn-cp-size", "2"],
    ["--optimistic-prefill-attempts", "1"], ["--enable-pdmux"], ["--enable-lmcache"],
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One spec, by its changes, and the name of its model."""

    changes: dict[str, Any]
    model: str


@dataclass(frozen=True)
class Judged:
    """A spec, what SGLang says ('' where both sides start), and the rules that fail; `starts` are those of them
    that speak of the start."""

    drawn: Drawn
    refusal: str
    fails: frozenset[str]
    starts: frozenset[str]


def _cache(draw: random.Random, *, decode: bool) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {}
    wanted = {
        "ratio": draw.choice((None, None, 2)),
        "storageBackend": draw.choice((None, "file", "mooncake")),
        "layout": draw.choice((None, "layer_first", "page_first_direct", "page_head")),
        "ioBackend": draw.choice((None, "direct", "kernel")),
        "writePolicy": draw.choice((None, "write_back")),
        "mode": draw.choice(("Cache", "Offload")) if decode else None,
        "hostMemoryMode": None if decode else draw.choice((None, "buffer_only")),
    }
    return {"hierarchicalCache": {name: value for name, value in wanted.items() if value is not None}}


def _role(draw: random.Random, *, decode: bool) -> dict[str, Any]:
    return {
        **_cache(draw, decode=decode),
        "tensorParallelSize": draw.choice((1, 2, 4, 8)),
        "attentionDataParallelSize": draw.choice((1, 1, 1, 2)),
        "pipelineParallelSize": draw.choice((1, 1, 1, 2)),
        "extraArgs": draw.choice(EXTRA),
        "template": HOPPER,
    }


def _draw(draw: random.Random) -> Drawn:
    decode = _role(draw, decode=True)
    decode["radixCache"] = draw.choice((False, False, True))
    decode["hostKV"] = {"mode": draw.choice(("Off", "Off", "HostReceive", "HiSparse"))}
    backup = draw.choice((None, None, "cpu_tensor", "host_pool", "none"))
    changes = {
        "transfer": {"backend": draw.choice(("PDCluster", "NIXL", "Mooncake"))},
        "kvCache": draw.choice(({}, {"pageSize": 16}, {"pageSize": 64, "dtype": "bfloat16"}, {"dtype": "fp8_e4m3"})),
        "prefill": _role(draw, decode=False),
        "decode": decode | ({"retractionBackup": backup} if backup else {}),
    }
    return Drawn(changes, draw.choice(("gqa", "gqa", "dsa")))


def specs(models: dict[str, str]) -> list[Drawn]:
    """COUNT specs that the API server would take."""
    draw = random.Random(SEED)
    found: list[Drawn] = []
    while len(found) < COUNT:
        drawn = _draw(draw)
        if not manifest_problems(manifest(drawn.changes, models[drawn.model])):
            found.append(drawn)
    return found


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> list[Judged]:
    models = make_models(tmp_path_factory.mktemp("models"))
    drawn = specs(models)
    lines = [
        {"argv": arguments(d.changes, role, models[d.model]), "accelerator": "SM90"} for d in drawn for role in Role
    ]
    said = [answer.get("refused") or answer.get("error") or "" for answer in ask_sglang(lines, [])["lines"]]
    found = []
    for index, d in enumerate(drawn):
        spec, geometry = spec_of(d.changes, models[d.model]), from_hf_config(MODELS[d.model])
        report = compat.check(*spec_facts(spec, geometry), spec.transfer.backend)
        sides = [f"{r.value}: {text}" for r, text in zip(Role, said[2 * index : 2 * index + 2], strict=True) if text]
        found.append(
            Judged(
                d,
                "; ".join(sides),
                frozenset(f.rule for f in preflight(spec, geometry).of("Fail")),
                frozenset(f.rule for f in report.findings if f.status.value == "Fail" and f.severity == "START"),
            )
        )
    return found


def test_what_sglang_refuses_has_been_refused_before(judged: list[Judged]) -> None:
    slipped = [f"{j.drawn}: {j.refusal}" for j in judged if j.refusal and not j.fails]
    assert not slipped, "\n".join(slipped)
    assert sum(bool(j.refusal) for j in judged) >= 20


def test_what_is_said_to_be_refused_at_start_is(judged: list[Judged]) -> None:
    wrong = [f"{j.starts - LATER}: {j.drawn}" for j in judged if j.starts - LATER and not j.refusal]
    assert not wrong, "\n".join(wrong)
    assert sum(not j.refusal and not j.fails for j in judged) >= 10
