"""Runs the passes in SGLang's own order, once per kind of accelerator that it may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import EngineType
from pdtransfer.contract.effective import (
    attention,
    decode,
    dtypes,
    hicache,
    pages,
    parallel,
    pools,
    special,
    speculation,
    transport,
)
from pdtransfer.contract.effective.rewrite import Draft, Effective, Rewrite
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import ModelGeometry

NVIDIA = (Accelerator.SM80, Accelerator.SM89, Accelerator.SM90, Accelerator.SM100, Accelerator.SM120)
GPUS = (*NVIDIA, Accelerator.ROCM)
"""What an accelerator that is not told may be. Nobody serves in earnest on the CPU, and who tests there says so."""


def _pages_of_model(d: Draft) -> None:
    pages.of_model(d, backend_was_unset=d.asked.attention_backend == "")


PASSES: tuple[Callable[[Draft], None], ...] = (
    parallel.attention_dp,
    parallel.prefill_cp,
    hicache.size,
    transport.mooncake_tcp,
    decode.host_receive,
    decode.radix_cache,
    special.prefix_cache,
    pools.sliding_layers,
    decode.extra_slots,
    transport.bootstrap_port,
    dtypes.kv_dtype,
    dtypes.dsa_backend,
    attention.attention,
    _pages_of_model,
    pages.of_backend,
    special.forced_last,
    hicache.layout,
    transport.load_balance,
    speculation.speculation,
    decode.running_requests,
    decode.optimistic_prefill,
    decode.retraction_backup,
    hicache.decode_ratio,
    transport.nixl_threads,
)


def effective(
    facts: RoleFacts, geometry: ModelGeometry | None = None, accelerator: Accelerator | None = None
) -> Effective:
    """What SGLang 0.5.23 will run with when it is given `facts`. Pure; never raises for any facts.

    `geometry` and `accelerator` default to those in the facts. In the result None is not known: what
    hangs on an accelerator that nobody told is None unless all kinds agree. A page size that was set is taken
    as kept where the model's architecture is not known. Facts of another engine, and those that a server told of
    itself (`resolved`), come back as they are."""
    if facts.engine is not EngineType.SGLANG or facts.resolved:
        return Effective(facts)
    shape = geometry or facts.geometry
    chip = accelerator or facts.accelerator
    try:
        return _kept(facts, shape, chip)
    except TypeError:  # facts that hold a list or a set: nothing to keep them by
        return _worked_out(facts, shape, chip)


def _worked_out(facts: RoleFacts, shape: ModelGeometry | None, chip: Accelerator | None) -> Effective:
    kinds = GPUS if chip is None else NVIDIA if chip is Accelerator.NVIDIA else (chip,)
    return _merged([_run(facts, shape, kind) for kind in kinds])


# An operator asks about the same few roles with every look at a cluster.
_kept = lru_cache(maxsize=1024)(_worked_out)


def _run(facts: RoleFacts, geometry: ModelGeometry | None, accelerator: Accelerator) -> Draft:
    draft = Draft(facts, geometry, accelerator)
    for one in PASSES:
        one(draft)
    return draft


def _merged(drafts: Sequence[Draft]) -> Effective:
    """One answer of several drafts: what they agree on, and None for the rest."""
    first = drafts[0]
    rewrites: list[Rewrite] = []
    # What is None from here on is not known, and no longer "not set".
    update: dict[str, object] = {"whole_command": False}
    for field in dict.fromkeys(name for d in drafts for name in sorted(d.touched)):
        values = [getattr(d.now, field) for d in drafts]
        if all(v == values[0] for v in values):
            found = first.rewrites.get(field)
            if found is not None:
                rewrites.append(found)
            continue
        update[field] = None
        some = next(r for d in drafts if (r := d.rewrites.get(field)) is not None)
        rewrites.append(Rewrite(field, some.asked, None, _by_kind(field, drafts), some.source, some.rule))
    return Effective(first.now.model_copy(update=update), tuple(rewrites))


def _by_kind(field: str, drafts: Sequence[Draft]) -> str:
    """`it depends on the accelerator: 1 on SM90; 64 on SM100`."""
    kinds: dict[str, list[str]] = {}
    for d in drafts:
        value = getattr(d.now, field)
        kinds.setdefault("not known" if value is None else str(value), []).append(d.accelerator.value)
    told = "; ".join(f"{value} on {', '.join(names)}" for value, names in kinds.items())
    return f"it depends on the accelerator: {told}"
