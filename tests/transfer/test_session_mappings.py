"""Mappings that the plan's property test draws, through whole endpoints: KV heads fewer than ranks, MLA rows, index
rows and a draft layer beside them, with a prefix that decode has, a ragged last page and random pages."""

from __future__ import annotations

import numpy as np
import pytest
from kv_world import BOOTSTRAP, QUICK, READY, TOKENS, Pool, World, template
from places import address_of

from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.agent.port import AgentPort
from pdtransfer.contract.base import Role
from pdtransfer.contract.layout import HeadSlice, RankCoordinates
from pdtransfer.contract.pairing import meet
from pdtransfer.session.api import EndpointConfig, PoolRegion, TransferState
from pdtransfer.session.endpoint import RankEndpoint

SUCCESS = TransferState.SUCCESS
SRC, DST, HELD = [5, 1, 9, 2, 8], [7, 0, 3], 2
"""Decode has the first HELD pages of the prompt; DST takes the rest."""
Key = tuple[int, str, bool]
"""Layer, kind, draft."""
PER_HEAD = {"K": 16, "V": 32}
"""Bytes of a head of one token: 8 and 16 dims of bfloat16."""
WHOLE = {"LATENT": 40, "INDEX": 12}
"""Bytes of a page's row for one token, of all ranks alike."""


def values(key: Key, page: int, heads: HeadSlice | None) -> np.ndarray:
    """Bytes of a prompt page on a rank that holds these heads."""
    layer, kind, draft = key
    rng = np.random.default_rng([layer, *kind.encode(), draft, page])
    if kind in WHOLE or heads is None:
        return rng.integers(1, 256, TOKENS * WHOLE[kind], dtype=np.uint8)
    every = rng.integers(1, 256, (TOKENS, heads.total, PER_HEAD[kind]), dtype=np.uint8)
    return every[:, heads.first : heads.first + heads.count].ravel()


class Holder:
    """A rank with these regions."""

    def __init__(self, world: World, role: Role, tp: int, size: int, total: int | None, keys: list[Key]) -> None:
        self.heads = None
        if total is not None:
            self.heads = HeadSlice(first=tp * total // size, count=max(1, total // size), total=total)
        self.arrays = {
            key: world.place.array((12, len(values(key, 0, self.heads))), np.uint8, world.place.memory) for key in keys
        }
        regions = [
            PoolRegion(layer, kind, address_of(a), a[0].nbytes, len(a), world.place.memory, draft=draft)
            for (layer, kind, draft), a in self.arrays.items()
        ]
        card = template(role, Pool(0, 1), f"{role.value}-1", emulated=world.place.emulated)
        at = {"heads": self.heads, "coordinates": RankCoordinates(tp=tp, tp_size=size)}
        model = card.model.model_copy(update={"total_kv_heads": total or 1})
        card = card.model_copy(update={"layout": card.layout.model_copy(update=at), "model": model})
        config = EndpointConfig("127.0.0.1", timeouts=QUICK, staging_bytes=8192, staging_slot_bytes=1024)

        def agent(name: str, _: EndpointConfig) -> AgentPort:
            return NixlAgent(name, net_devices="lo") if world.place.gpu else world.hub.agent(name)

        self.endpoint = RankEndpoint(card, regions, config, agent)
        world.ranks.append(self)  # type: ignore[arg-type]

    def holds(self) -> bool:
        """The pages asked for hold the prompt's, every other one nothing."""
        return all(
            all((a[page] == values(key, HELD + i, self.heads)).all() for i, page in enumerate(DST))
            and not np.delete(a, DST, axis=0).any()
            for key, a in self.arrays.items()
        )


@pytest.mark.parametrize(
    ("total", "p", "d"),
    [
        *((2, p, d) for p, d in ((4, 2), (2, 4), (4, 1), (1, 4), (4, 4))),
        *((1, p, d) for p, d in ((2, 1), (1, 2))),
        *((None, p, d) for p, d in ((2, 1), (1, 2), (2, 2), (4, 2))),
    ],
)
def test_replicated_heads_and_rows_of_all_heads_arrive_once_on_every_rank(world, place, total, p, d):
    """`total` KV heads; None: MLA. An index row lies beside each layer's KV, and a draft layer has the number of
    another one."""
    kinds = ("K", "V", "INDEX") if total is not None else ("LATENT", "INDEX")
    keys = [(layer, kind, False) for layer in range(2) for kind in kinds] + [(0, kind, True) for kind in kinds]
    prefill = [Holder(world, Role.PREFILL, t, p, total, keys) for t in range(p)]
    decode = [Holder(world, Role.DECODE, t, d, total, keys) for t in range(d)]
    world.wire(prefill, decode)  # type: ignore[arg-type]
    receivers = [
        r.endpoint.receive(
            room=1, attempt=0, bootstrap=BOOTSTRAP, pages=DST, first_page=HELD, tokens=len(SRC) * TOKENS - 1
        )
        for r in decode
    ]
    senders = []
    for rank in prefill:
        for key, array in rank.arrays.items():
            for i, page in enumerate(SRC):
                array[page] = values(key, i, rank.heads)
        sender = rank.endpoint.send(room=1, tokens=len(SRC) * TOKENS - 1)
        sender.chunk(SRC[:3], 0, READY)
        sender.chunk(SRC[3:], 3, READY)
        sender.finish(b"m")
        asked = any(meet(rank.endpoint.card.layout, r.endpoint.card.layout) for r in decode)
        senders += [sender] * asked
    assert len(senders) >= min(p, d)
    for transfer in (*receivers, *senders):
        assert transfer.wait(30) is SUCCESS, transfer.error
    assert all(r.holds() for r in decode)
