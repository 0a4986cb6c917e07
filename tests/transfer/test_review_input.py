"""Input that a frame or a page list can not carry: it is refused by name, or cut, and the endpoint lives on."""

from __future__ import annotations

import numpy as np
import pytest
from kv_world import BOOTSTRAP, TOKENS, World, ask, give, until

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import RankLayout, Region, RegionKind
from pdtransfer.errors import BadInput, LayoutMismatch
from pdtransfer.plan import check_pages
from pdtransfer.session.api import TransferState
from pdtransfer.session.frames import PoolPages

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


@pytest.mark.parametrize("who", ["decode", "prefill"])
@pytest.mark.parametrize("reason", ["user said \ud800", "x" * (5 << 20)], ids=["surrogate", "long"])
def test_any_reason_of_an_abort_can_be_told(world: World, who: str, reason: str):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [1, 2])
    sender = give(prefill, 1, [3, 4], finish=False)
    assert until(lambda: prefill.endpoint._source._rooms.open.get(1) and prefill.endpoint._source._rooms.open[1].legs)
    (receiver if who == "decode" else sender).abort(reason)
    assert receiver.wait(30) is FAILED and receiver.error is not None
    if who == "decode":
        sender.abort("too")
    assert sender.wait(30) is FAILED
    assert prefill.endpoint.failed is None and decode.endpoint.failed is None
    assert until(lambda: receiver.pages_releasable)
    again = ask(decode, 2, [1, 2])
    give(prefill, 2, [3, 4])
    assert again.wait(30) is SUCCESS, again.error


def test_an_error_of_a_ready_event_can_be_told_whatever_it_says(world: World):
    (prefill,), (decode,) = world.pair()

    class Broken:
        def wait(self, timeout: float) -> bool:
            raise RuntimeError("x" * (5 << 20))

    receiver = ask(decode, 1, [1])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
    sender.chunk([3], 0, Broken())
    assert receiver.wait(30) is FAILED and sender.wait(30) is FAILED
    assert prefill.endpoint.failed is None


@pytest.mark.parametrize("pools", [{"swa": range(70_000)}, {f"p{i}": [0] for i in range(17)}], ids=["pages", "pools"])
def test_page_lists_that_no_request_can_hold_are_refused_by_name(world: World, pools):
    _, (decode,) = world.pair()
    with pytest.raises((BadInput, LayoutMismatch), match="pools"):
        decode.endpoint.receive(
            room=1,
            attempt=0,
            bootstrap=BOOTSTRAP,
            pages=[1],
            tokens=TOKENS,
            pools={name: list(pages) for name, pages in pools.items()},
        )


def region(layer: int, memory: MemoryKind, items: int, pool: str = "") -> Region:
    address = 1 << (30 + layer + 5 * (memory is MemoryKind.DRAM))
    return Region(
        layer=layer, kind=RegionKind.KEY, item_bytes=64, items=items, memory=memory, address=address, pool=pool
    )


def test_a_page_must_lie_in_every_region_that_a_request_takes_also_where_one_layer_is_in_both_memories():
    vram, dram = MemoryKind.VRAM, MemoryKind.DRAM
    layout = RankLayout(
        page_tokens=4,
        kv_dtype="bfloat16",
        regions=(region(0, vram, 8), region(0, dram, 64), region(1, vram, 8)),
    )
    check_pages(layout, [7], "decode", memory=dram)
    with pytest.raises(LayoutMismatch, match="outside"):  # layer 1 is in VRAM only, and has 8 pages
        check_pages(layout, [40], "decode", memory=dram)
    both = layout.model_copy(update={"regions": (region(0, vram, 8), region(0, dram, 64))})
    check_pages(both, [40], "decode", memory=dram)  # the other memory's size is no bound
    with pytest.raises(LayoutMismatch, match="outside"):
        check_pages(both, [40], "decode", memory=vram)


@pytest.mark.parametrize(
    "pools",
    [(PoolPages(pool="", pages=(31,)),), (PoolPages(pool="swa", pages=(1 << 39,)),)],
    ids=["the KV pages again", "a pool that decode has not"],
)
def test_a_request_whose_other_page_lists_make_no_sense_is_refused_by_prefill(world: World, pools):
    (prefill,), (decode,) = world.pair()
    destination = decode.endpoint._destination
    real = destination._ask

    def forge(peer, leg) -> None:
        leg.request = leg.request.model_copy(update={"pools": pools})
        real(peer, leg)

    destination._ask = forge
    before = {key: array.copy() for key, array in decode.pool.arrays.items()}
    receiver = ask(decode, 1, [1, 2])
    sender = give(prefill, 1, [3, 4])
    assert receiver.wait(30) is FAILED
    assert isinstance(receiver.error, LayoutMismatch) and "pool" in str(receiver.error), receiver.error
    assert all(np.array_equal(before[key], array) for key, array in decode.pool.arrays.items())
    sender.abort("nobody asks")
