"""What an engine hands to its endpoint, checked in the engine's own thread before anything is taken up. Pure.

Every refusal is a BadInput that names the argument, what it was and what it has to be; nothing is changed by a call
that is refused. What lies outside the other side's layout or pool is not judged here (LayoutMismatch, later).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.layout import Region, RegionKind
from pdtransfer.errors import BadInput
from pdtransfer.session.api import EndpointConfig, PoolRegion

TLS_FILES = ("ca.crt", "tls.crt", "tls.key")
NOWHERE = frozenset({"", "0.0.0.0", "::", "[::]"})
"""Addresses to listen on that nobody can dial."""
MAX_NAME = 256
"""Letters of a page space's name; requests carry it."""
STRATEGIES: tuple[str, ...] = get_args(get_type_hints(EndpointConfig)["strategy"])
E = TypeVar("E", bound=StrEnum)


def whole(name: str, value: object, low: int, high: int, *, room: int | None = None) -> int:
    """`value` as an int in `low .. high - 1`; numpy's integers are taken, bools and fractions are not."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise BadInput(f"{name}: a whole number is needed, not {_shown(value)}", room=room) from None
    if not low <= number < high:
        raise BadInput(f"{name}: {number} is not in {low} .. {high - 1}", room=room)
    return number


def seconds(name: str, value: object, *, zero: bool = False) -> float:
    """`value` as finite seconds, above 0 (or 0 where `zero`)."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise BadInput(f"{name}: seconds are needed, not {_shown(value)}")
    number = float(value)
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise BadInput(f"{name}: {number} s is no time that ends; give {'0 or ' if zero else ''}more than 0")
    return number


def words(name: str, value: object, *, empty: bool = False, room: int | None = None) -> str:
    """`value` as text."""
    if not isinstance(value, str):
        raise BadInput(f"{name}: text is needed, not {_shown(value)}", room=room)
    if not value and not empty:
        raise BadInput(f"{name}: must not be empty", room=room)
    return value


def choice(name: str, value: object, kind: type[E], *, room: int | None = None) -> E:
    """`value` as one of an enum's words."""
    try:
        return kind(value)  # type: ignore[arg-type]
    except ValueError:
        known = ", ".join(kind)
        raise BadInput(f"{name}: {_shown(value)} is unknown; it is one of {known}", room=room) from None


def pages(name: str, value: object, *, room: int | None = None) -> tuple[int, ...]:
    """`value` as page numbers (any sequence of whole numbers, numpy arrays too)."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            told = f"a flat array of integers is needed, not {value.dtype} of shape {value.shape}"
            raise BadInput(f"{name}: {told}", room=room)
        value = value.tolist()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise BadInput(f"{name}: a list of page numbers is needed, not {_shown(value)}", room=room)
    if all(type(page) is int for page in value) and (not value or (min(value) >= 0 and max(value) < 1 << 40)):
        return tuple(value)  # as engines give them: no call for each
    return tuple(whole(f"{name}[{i}]", page, 0, 1 << 40, room=room) for i, page in enumerate(value))


def pools(name: str, value: object, *, room: int | None = None) -> dict[str, tuple[int, ...]]:
    """`value` as page lists by page space; None is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadInput(f"{name}: page lists by pool are needed, not {_shown(value)}", room=room)
    for key in value:
        if len(words(f"{name} (a key)", key, room=room)) > MAX_NAME:
            raise BadInput(f"{name} (a key): {len(key)} letters, {MAX_NAME} may be", room=room)
    return {key: pages(f"{name}[{key!r}]", held, room=room) for key, held in value.items()}


def memory(name: str, value: object, *, room: int | None = None) -> MemoryKind | None:
    """`value` as a memory kind; None is any."""
    return None if value is None else choice(name, value, MemoryKind, room=room)


def metadata(name: str, value: object, *, room: int | None = None) -> bytes:
    """`value` as bytes. bytes() alone would take a number for a length."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise BadInput(f"{name}: bytes are needed, not {_shown(value)}", room=room)
    return bytes(value)


def ready(name: str, value: object, *, room: int | None = None) -> Any:
    """`value` has a `wait(timeout)`."""
    if not callable(getattr(value, "wait", None)):
        raise BadInput(f"{name}: an event with wait(timeout) is needed, not {_shown(value)}", room=room)
    return value


def layers(name: str, value: object, *, room: int | None = None) -> range | None:
    """`value` as a range of layers without gaps; None is all."""
    if value is None:
        return None
    if not isinstance(value, range) or value.step != 1 or value.start < 0 or not value:
        raise BadInput(f"{name}: a range of layers without gaps is needed, not {_shown(value)}", room=room)
    return value


def cards(name: str, value: object) -> tuple[RankCard, ...]:
    """`value` as cards. Whether one can be wired is a verdict of its own."""
    for i, card in enumerate(_several(name, value)):
        if not isinstance(card, RankCard):
            raise BadInput(f"{name}[{i}]: a RankCard is needed, not {_shown(card)}")
    return tuple(value)  # type: ignore[arg-type]


def names(name: str, value: object) -> tuple[str, ...]:
    """`value` as texts; one text alone would be read letter by letter."""
    return tuple(words(f"{name}[{i}]", one) for i, one in enumerate(_several(name, value)))


def template(value: object) -> RankCard:
    """`card_template` of an endpoint. Outside a cluster `cluster_uid` is empty, on both sides."""
    if not isinstance(value, RankCard):
        raise BadInput(f"card_template: a RankCard is needed, not {_shown(value)}")
    for field in ("pod_uid", "incarnation"):
        words(f"card_template.{field}", getattr(value, field))
    return value


def config(value: object) -> EndpointConfig:
    """An EndpointConfig whose every field can be used."""
    if not isinstance(value, EndpointConfig):
        raise BadInput(f"config: an EndpointConfig is needed, not {_shown(value)}")
    words("config.listen_host", value.listen_host)
    words("config.server_name", value.server_name)
    if words("config.advertise_host", value.advertise_host, empty=True) in NOWHERE:
        raise BadInput(f"config.advertise_host: peers can not dial {value.advertise_host!r}; give the pod's address")
    if value.net_devices is not None:
        words("config.net_devices", value.net_devices)
    words("config.nixl_plugin", value.nixl_plugin)  # the agent asks NIXL what it has
    if not isinstance(value.nixl_params, Mapping):
        raise BadInput(f"config.nixl_params: texts by name are needed, not {_shown(value.nixl_params)}")
    for key, text in value.nixl_params.items():
        words(f"config.nixl_params[{words('config.nixl_params (a key)', key)!r}]", text, empty=True)
    whole("config.control_port", value.control_port, 0, 1 << 16)
    whole("config.window_bytes", value.window_bytes, 1, 1 << 63)
    whole("config.window_ops", value.window_ops, 1, 1 << 31)
    whole("config.staging_bytes", value.staging_bytes, 0, 1 << 63)
    whole("config.staging_slot_bytes", value.staging_slot_bytes, 1, 1 << 40)
    if 0 < value.staging_bytes < value.staging_slot_bytes:
        told = f"{value.staging_bytes} bytes hold no slot of {value.staging_slot_bytes} (config.staging_slot_bytes)"
        raise BadInput(f"config.staging_bytes: {told}; give 0 for none")
    if value.quarantine_cap is not None:
        whole("config.quarantine_cap", value.quarantine_cap, 0, 1 << 63)
    if value.strategy not in STRATEGIES:
        told = f"{_shown(value.strategy)} is unknown; it is one of {', '.join(STRATEGIES)}"
        raise BadInput(f"config.strategy: {told}")
    if not isinstance(value.digest, bool):
        raise BadInput(f"config.digest: True or False is needed, not {_shown(value.digest)}")
    for field in fields(value.timeouts):
        seconds(f"config.timeouts.{field.name}", getattr(value.timeouts, field.name))
    if value.tls_dir is not None:
        folder = Path(words("config.tls_dir", value.tls_dir))
        missing = [file for file in TLS_FILES if not (folder / file).is_file()]
        if missing:
            raise BadInput(f"config.tls_dir: {folder} has no {', '.join(missing)}; mount the pod's certificate there")
    return value


def regions(pool: object, real: Callable[[MemoryKind], MemoryKind]) -> tuple[Region, ...]:
    """The pool's regions. `real` tells where a kind really lies (emulated VRAM is host memory): two regions
    may not share bytes there."""
    if not (given := _several("pool", pool)):
        raise BadInput("pool: no region; hand over the buffers of the KV pool")
    made = tuple(_region(f"pool[{i}]", held) for i, held in enumerate(given))
    keys: dict[object, int] = {}
    for i, region in enumerate(made):
        first = keys.setdefault((region.key, region.memory), i)
        if first != i:
            told = f"layer {region.layer} {region.kind} in {region.memory} is pool[{first}] already"
            raise BadInput(f"pool[{i}]: {told}; a layer has one region of a kind in each memory")
    spans = sorted(
        (real(r.memory or MemoryKind.DRAM), r.device, r.address, r.address + r.item_bytes * r.items, i)
        for i, r in enumerate(made)
    )
    for (kind, device, _, end, i), (other, its, start, _, j) in itertools.pairwise(spans):
        if (kind, device) == (other, its) and start < end:
            raise BadInput(f"pool[{j}].address: it begins {end - start} bytes before pool[{i}] ends; regions overlap")
    return made


def _region(name: str, held: object) -> Region:
    if not isinstance(held, PoolRegion):
        raise BadInput(f"{name}: a PoolRegion is needed, not {_shown(held)}")
    address = whole(f"{name}.address", held.address, 1, 1 << 64)
    size = whole(f"{name}.item_bytes", held.item_bytes, 1, 1 << 48)
    items = whole(f"{name}.items", held.items, 1, 1 << 48)
    if address + size * items > 1 << 64:
        raise BadInput(f"{name}.items: {items} items of {size} bytes from {address} go beyond the address space")
    if not isinstance(held.draft, bool):
        raise BadInput(f"{name}.draft: True or False is needed, not {_shown(held.draft)}")
    return Region(
        layer=whole(f"{name}.layer", held.layer, 0, 1 << 31),
        kind=choice(f"{name}.kind", held.kind, RegionKind),
        item_bytes=size,
        items=items,
        memory=choice(f"{name}.memory", held.memory, MemoryKind),
        device=whole(f"{name}.device", held.device, 0, 1 << 32),
        address=address,
        draft=held.draft,
        pool=words(f"{name}.pool", held.pool, empty=True),
    )


def _several(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise BadInput(f"{name}: a list is needed, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    told = repr(value)
    return f"{type(value).__name__} {told if len(told) <= 60 else told[:57] + '...'}"
