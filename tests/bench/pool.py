"""A rank's KV pool in host memory, with bytes that say where they belong.

A number depends on the region, the prefill page, the token in it, the global head and the dimension, so that decode
can check what came without asking.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from shape import Setup

from pdtransfer.contract.base import EngineType, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout
from pdtransfer.session.api import PoolRegion

BOOTSTRAP = "bench:1"


class Pool:
    """[region, page, token, head, dim] of 16-bit numbers."""

    def __init__(self, setup: Setup, role: str, tp: int) -> None:
        self.setup, self.role, self.tp = setup, role, tp
        self.size = setup.prefill if role == "prefill" else setup.decode
        model = setup.model
        self.heads = model.heads // self.size
        self.first = tp * self.heads
        self.array = np.zeros((model.regions, setup.pool_pages, setup.page, self.heads, model.dim), dtype=np.uint16)
        if role == "prefill":
            pages = np.arange(setup.pool_pages)
            for region in range(model.regions):
                np.add(self._page(), self._shift(region, pages), out=self.array[region])
        else:
            self.array.fill(1)  # no page is touched for the first time in a measurement

    def _page(self) -> npt.NDArray[np.uint16]:
        model, setup = self.setup.model, self.setup
        token = np.arange(setup.page).reshape(-1, 1, 1) * 31
        head = np.arange(self.first, self.first + self.heads).reshape(1, -1, 1) * 1017
        return (token + head + np.arange(model.dim) * 3).astype(np.uint16)

    @staticmethod
    def _shift(region: int, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        return (region * 7919 + pages * 131).astype(np.uint16).reshape(-1, 1, 1, 1)

    def forget(self, pages: Sequence[int]) -> None:
        """Make sure that these pages do not hold the right bytes by chance."""
        self.array[:, list(pages)] = 0

    def wrong(self, pages: Sequence[int], source_pages: Sequence[int]) -> int:
        """Numbers that differ from what `source_pages` hold at prefill."""
        source = np.asarray(source_pages, dtype=np.int64)
        return sum(
            int((self.array[region, list(pages)] != self._page() + self._shift(region, source)).sum())
            for region in range(self.setup.model.regions)
        )

    def regions(self) -> list[PoolRegion]:
        """For an endpoint."""
        return [
            PoolRegion(i // 2, "KV"[i % 2], int(r.ctypes.data), r[0].nbytes, self.setup.pool_pages)
            for i, r in enumerate(self.array)
        ]

    def card(self, pod: str) -> RankCard:
        """The card of this rank, to be completed by the endpoint."""
        return RankCard(
            cluster_uid="bench",
            pod_uid=pod,
            role=Role(self.role),
            incarnation=pod,
            model=ModelIdentity(name="bench", dtype="bfloat16", layers=self.setup.model.layers),
            layout=RankLayout(
                page_tokens=self.setup.page,
                kv_dtype="bfloat16",
                heads=HeadSlice(first=self.first, count=self.heads, total=self.setup.model.heads),
                coordinates=RankCoordinates(tp=self.tp, tp_size=self.size),
            ),
            engine=EngineFacts(type=EngineType.REFERENCE, version="bench"),
            agent_name="",
            bootstrap=BOOTSTRAP if self.role == "prefill" else "",
        )
