"""Which strategy moves unequal slices and small pages fastest: a pure cost rule over calibrated rates. Pure.

Per pair of ranks, with b bytes, N pieces, thread seconds of each side are

    direct   N = pages       src = N cs + b ws           dst = N cd + b wd
    sliced   N = slices      src = N cs + b ws           dst = N cd + b wd
    merge    N = pages       src = N cs + b ws           dst = N cd + b wd + scatter
    split    N = pages       src = N cs + b ws + pack    dst = N cd + b wd
    staged   N = blocks      src = N cs + b ws + pack    dst = N cd + b wd + scatter

    pack = b / m + slices * p    scatter = b / m' + slices * s   + `chunk` per block and side that handles it

and the predicted time is the largest of: the source's seconds times the decode ranks it serves, the
destination's times the prefill ranks it takes from, the seconds of all pairs on one host divided by its
cores, and the time that the lent slots are held divided by their number. Rule, constants and the cells
it was fitted to: the transfer study (CMA and TCP on two cores; the test holds the table). More cores and
RDMA follow the same formula and are not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from pdtransfer.plan.blocks import block_count
from pdtransfer.plan.lanes import STRATEGIES, PairPlan, Strategy

Transport = Literal["shared", "tcp", "rdma"]

TIE = 0.10
"""Within this of the fastest, a strategy that never writes a KV page remotely is preferred: a late write
can then only hit a slot."""
SLOTS_A_LEG = 4
"""Slots one leg holds at a time."""


@dataclass(frozen=True)
class CopyRates:
    """Copies in a rank's own memory: bytes/s of packing and scattering long rows, and the seconds that
    each row costs besides its bytes. `on_cores`: they take CPU time (copies in a GPU's memory do not)."""

    pack: float
    scatter: float
    pack_row: float
    scatter_row: float
    on_cores: bool = True


@dataclass(frozen=True)
class WireRates:
    """Seconds a piece and a byte cost at the source and at the destination. `on_cores`: the CPU moves
    the bytes (shared memory, TCP), a NIC does otherwise."""

    source_piece: float
    source_byte: float
    destination_piece: float
    destination_byte: float
    on_cores: bool = True


HOST_COPY = CopyRates(6.8e9, 5.8e9, 45e-9, 105e-9)
"""Fitted in the transfer study; what a failed calibration of host memory falls back to."""
DEVICE_COPY = CopyRates(400e9, 400e9, 0.0, 0.0, on_cores=False)
"""For a GPU's memory; an assumption, not measured."""
WIRE: Mapping[Transport, WireRates] = MappingProxyType(
    {
        "shared": WireRates(1.6e-6, 0.245e-9, 0.0, 0.0),
        "tcp": WireRates(2.7e-6, 0.33e-9, 2.5e-6, 0.22e-9),
        # Not measured here: a work request a piece, 200 Gbit/s, the destination's CPU idle.
        "rdma": WireRates(0.5e-6, 0.04e-9, 0.0, 0.0, on_cores=False),
    }
)


@dataclass(frozen=True)
class Rates:
    """What one pair of ranks was calibrated to."""

    source: CopyRates = HOST_COPY
    destination: CopyRates = HOST_COPY
    wire: WireRates = WIRE["shared"]
    chunk: float = 3e-4
    """Seconds a side spends on each block besides its bytes: frames, indices, a handle, turns of the loop
    (this module's, in Python; 35 us in the study's bare pipeline)."""
    grant: float = 0.0
    """Seconds from asking for a slot to having it."""


@dataclass(frozen=True)
class Load:
    """The part of one request of one pair that has a choice: bytes, slices, pages (times regions) and blocks."""

    nbytes: int
    slices: int
    pages: int
    blocks: int


@dataclass(frozen=True)
class Setting:
    """Where the request runs. `sources`: prefill ranks this decode rank takes it from; `askers`: decode
    ranks the prefill rank serves; `pairs`: pairs of both engines moving at once (0: the larger of those
    two). `cores` of one host; `same_host`: both engines share them. `slots` one leg can hold."""

    sources: int = 1
    askers: int = 1
    pairs: int = 0
    cores: int = 1
    same_host: bool = False
    slots: int = SLOTS_A_LEG


@dataclass(frozen=True)
class Choice:
    """The strategy, the predicted seconds of every allowed one, and why the others are not allowed."""

    strategy: Strategy
    seconds: Mapping[Strategy, float]
    refused: Mapping[Strategy, str] = field(default_factory=dict)


def load_of(pair: PairPlan, pages: int, pools: Mapping[str, int] | None = None, slot_bytes: int = 0) -> Load:
    """The load of `pages` KV pages and `pools[name]` pages of other page spaces; blocks of `slot_bytes`."""
    counts = {**(pools or {}), "": pages}
    nbytes = slices = units = blocks = 0
    for lane in pair.lanes:
        n = counts.get(lane.pool, 0)
        if not lane.chooses or not n:
            continue
        nbytes += lane.unit * lane.regions * n
        slices += lane.tokens * lane.regions * n
        units += lane.regions * n
        blocks += block_count(lane, n, slot_bytes)
    return Load(nbytes, slices, units, blocks)


def predict(strategy: Strategy, load: Load, setting: Setting, rates: Rates) -> float:
    """Seconds from the first byte until the last one is in place, all pairs of the request moving."""
    wire, b = rates.wire, load.nbytes
    pieces = {"sliced": load.slices, "staged": load.blocks}.get(strategy, load.pages)
    packs, scatters = strategy in ("staged", "split"), strategy in ("staged", "merge")
    pack = b / rates.source.pack + load.slices * rates.source.pack_row if packs else 0.0
    scatter = b / rates.destination.scatter + load.slices * rates.destination.scatter_row if scatters else 0.0
    chunks = load.blocks * rates.chunk
    sent = pieces * wire.source_piece + b * wire.source_byte
    taken = pieces * wire.destination_piece + b * wire.destination_byte
    source = sent + pack + (chunks if strategy not in ("direct", "sliced") else 0.0)
    destination = taken + scatter + (chunks if scatters else 0.0)
    source_cores = source - (0.0 if rates.source.on_cores else pack) - (0.0 if wire.on_cores else b * wire.source_byte)
    destination_cores = destination - (0.0 if rates.destination.on_cores else scatter)
    pairs = setting.pairs or max(setting.sources, setting.askers)
    cores = max(1, setting.cores)
    if setting.same_host:
        host = pairs * (source_cores + destination_cores) / cores
    else:
        host = pairs * max(source_cores, destination_cores) / cores
    seconds = max(source * setting.askers, destination * setting.sources, host)
    if scatters:
        held = sent + taken + scatter + load.blocks * rates.grant
        seconds = max(seconds, held / max(1, min(setting.slots, load.blocks)))
        seconds += rates.grant
    return seconds


def choose(
    pair: PairPlan, load: Load, setting: Setting, rates: Rates, *, source_slot: int = 0, destination_slot: int = 0
) -> Choice:
    """The fastest allowed strategy by `predict`; within TIE of it, one that never writes into pages.

    `source_slot` and `destination_slot`: bytes of a slot of either side's arena, 0 where it has none.
    `sliced` is the last resort and is always among the predictions of an unequal pair that allows it.
    A pair with no unequal slices and no small pages is `direct`."""
    if not pair.choosing:
        return Choice("direct", {"direct": 0.0})
    slots: dict[Strategy, int] = {
        "staged": min(source_slot, destination_slot),
        "merge": destination_slot,
        "split": source_slot,
    }
    seconds: dict[Strategy, float] = {}
    refused: dict[Strategy, str] = {}
    for strategy in STRATEGIES:
        why = pair.allowed(strategy, slots.get(strategy, 0))
        if why is None:
            seconds[strategy] = predict(strategy, load, setting, rates)
        else:
            refused[strategy] = why
    return Choice(pick(seconds, {s for s in seconds if not pair.in_place(s)}), seconds, refused)


def pick(seconds: Mapping[Strategy, float], safe: set[Strategy]) -> Strategy:
    """The smallest of `seconds`; the smallest of the `safe` ones where that is within TIE of it."""
    best = min(seconds, key=lambda s: seconds[s])
    safest = min((s for s in seconds if s in safe), key=lambda s: seconds[s], default=best)
    return safest if seconds[safest] <= seconds[best] * (1 + TIE) else best


def with_wire(rates: Rates, transport: Transport, piece_seconds: float, byte_seconds: float) -> Rates:
    """`rates` with what a probe measured: seconds a piece and a byte from post to completion. Over TCP
    the two ends work at once and about equally long, so the elapsed time is either's."""
    if transport == "tcp":
        wire = WireRates(piece_seconds, byte_seconds, piece_seconds, byte_seconds)
    else:
        wire = replace(WIRE[transport], source_piece=piece_seconds, source_byte=byte_seconds)
    return replace(rates, wire=wire)
