"""Family A, continued: pipeline stages of the two sides."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.parallelism import TP, geometry_of
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
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.families import is_deepseek_v4
from pdtransfer.contract.geometry import ModelGeometry

A = Family()
_PREFILL_1 = "set prefill pipelineParallelSize to 1"


@A.rule(
    "A8",
    "Decode's pipeline stages are 1 or prefill's",
    columns(Outcome.REQ, Outcome.DCRASH, Outcome.DCRASH),
    needs=("pipeline_parallel",),
    change="set decode pipelineParallelSize to 1 (or to prefill's)",
    engines=SGLANG_ONLY,
)
def a8(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    """SGLang's common classes, which backend PDCluster's stand on too, map no others; the mover itself does."""
    if d.pipeline_parallel in (1, p.pipeline_parallel):
        return None
    return Hit(f"prefill has {p.pipeline_parallel} pipeline stages, decode {d.pipeline_parallel}")


@A.rule(
    "A9",
    "Prefill stages into one decode stage need layer ids",
    columns(Outcome.START, Outcome.PDEAD, Outcome.WRONG),
    needs=("geometry", "pipeline_parallel", *TP),
    change=_PREFILL_1 + ", or transfer.backend PDCluster (layers are mapped by id)",
)
def a9(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if backend is Backend.PDCLUSTER:
        return _a9_pdcluster(p, d)
    if p.pipeline_parallel == 1 or d.pipeline_parallel != 1:
        return None
    geometry, stages = geometry_of(p, d), f"prefill has {p.pipeline_parallel} pipeline stages, decode 1"
    if is_deepseek_v4(geometry):
        # One latent row for all ranks, so TP does not matter; Mooncake counts by compression ratio.
        what = f"{stages}, and the backend sends no layer ids for DeepSeek-V4"
        return Hit(what) if backend is Backend.NIXL else None
    # MLA is mapped by the stage's layer span, layers beside linear attention by their ids.
    if attention_tp(p) != attention_tp(d) or geometry.latent or geometry.linear_layers:
        return None
    if backend is Backend.NIXL:
        return Hit(f"{stages}, both attention TP {attention_tp(p)}, and the backend does not send layer ids for GQA")
    if not geometry.sliding_window_layers:
        return None
    return Hit(
        f"{stages}, and {len(geometry.sliding_window_layers)} of {geometry.layers} layers keep a sliding window: "
        "every stage's layers are counted from 0, so that the stages write over each other"
    )


def _a9_pdcluster(p: RoleFacts, d: RoleFacts) -> Hit | None:
    """State that SGLang hands over without layer ids has no place in a stage."""
    for facts in (p, d):
        if facts.pipeline_parallel == 1:
            continue
        geometry = geometry_of(p, d)
        v4 = is_deepseek_v4(geometry)
        if v4 or geometry.sliding_window_layers:
            what = "DeepSeek-V4" if v4 else f"{len(geometry.sliding_window_layers)} layers with a sliding window"
            return Hit(
                f"{facts.role.value} has {facts.pipeline_parallel} pipeline stages, and SGLang does not tell which "
                f"layers a stage holds of {what}",
                change="set pipelineParallelSize to 1",
                consequence="The backend can not map the layers and stops the engine at its start.",
            )
    return None


def stage_kv_layers(geometry: ModelGeometry, stages: int) -> list[int]:
    """Paged KV layers in each pipeline stage, as SGLang splits the layers by itself."""
    paged = frozenset(geometry.kv_layers)
    return [len(paged.intersection(geometry.stage_layers(stage, stages))) for stage in range(stages)]


def v_region(stage: int, total: int) -> int:
    """Where SGLang looks for the first V region of `total` decode layers when a stage holds `stage` of them.

    It should be `total`. A total that the stage does not divide is taken for a draft model's extra layers."""
    return total if total % stage == 0 else stage * (total // stage)


@A.rule(
    "A10",
    "Prefill stages into one decode stage divide the layers",
    columns(nixl=Outcome.WRONG, mooncake=Outcome.WRONG),
    needs=("geometry", "pipeline_parallel", *TP),
    change="use a pipelineParallelSize that divides the layers, 1, or transfer.backend PDCluster",
)
def a10(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.pipeline_parallel == 1 or d.pipeline_parallel != 1:
        return None
    # NIXL refuses equal TP (A9); Mooncake maps by the same arithmetic there.
    if backend is Backend.NIXL and attention_tp(p) == attention_tp(d):
        return None
    geometry = geometry_of(p, d)
    if geometry.latent or geometry.sliding_window_layers:
        return None
    if backend is Backend.MOONCAKE and geometry.linear_layers:
        return None  # Paired by layer id.
    total = len(geometry.kv_layers)
    stages = stage_kv_layers(geometry, p.pipeline_parallel)
    wrong = next((n for n in sorted(set(stages)) if n and v_region(n, total) != total), None)
    if wrong is None:
        return None
    return Hit(
        f"{total} layers over {p.pipeline_parallel} prefill stages: a stage of {wrong} layers makes the "
        f"backend look for V at region {v_region(wrong, total)} where decode has it at {total}"
    )


@A.rule(
    "A11",
    "Speculation that pipeline stages take",
    every(Outcome.START),
    needs=("pipeline_parallel", "speculative_algorithm"),
    change="drop speculation, or set pipelineParallelSize to 1; prefill's stages take EAGLE and DSPARK",
    engines=SGLANG_ONLY,
)
def a11(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if facts.pipeline_parallel == 1:
            continue
        algorithm = known(facts.speculative_algorithm, facts, "speculative_algorithm").upper()
        name = "EAGLE" if algorithm == "NEXTN" else algorithm
        if name in ("", "NONE"):
            continue
        what = f"{facts.role.value} has {facts.pipeline_parallel} pipeline stages and speculative algorithm {algorithm}"
        if facts is d or name not in ("EAGLE", "DSPARK"):
            return Hit(what)
        if name == "EAGLE" and facts.multi_layer_eagle:
            return Hit(what + ", multi-layer")
    return None
