"""Builds what a rank runs on: weights, pool, process group, endpoint, link. Imports torch."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pdtransfer.engines.reference.collective import Collective, make_collective
from pdtransfer.engines.reference.kv_pool import PagedKVPool, PoolShape, dtype_name, torch_dtype
from pdtransfer.engines.reference.llama import LlamaShard, Span
from pdtransfer.engines.reference.messages import Configure, RankFacts, Sampled, Step
from pdtransfer.engines.reference.model_config import LlamaConfig, load_config
from pdtransfer.engines.reference.options import Options
from pdtransfer.engines.reference.problems import SetupError
from pdtransfer.engines.reference.sampling import sample
from pdtransfer.engines.reference.transfers import RankTransfers
from pdtransfer.engines.reference.wake import Wake
from pdtransfer.errors import AgentError

if TYPE_CHECKING:
    from pdtransfer.contract.card import RankCard
    from pdtransfer.engines.reference.link import Link

log = logging.getLogger(__name__)
COLLECTIVE_TIMEOUT_S = 60.0


@dataclass
class Rank:
    """A rank that has loaded."""

    number: int
    model: LlamaShard
    pool: PagedKVPool
    collective: Collective
    transfers: RankTransfers
    facts: RankFacts
    link: Link | None
    wake: Wake = field(default_factory=Wake)

    def step(self, step: Step) -> tuple[Sampled, ...]:
        """Run one forward pass, hand finished pages to their senders, choose the next tokens (rank 0)."""
        spans = [Span(i.tokens, i.start, i.pages) for i in step.items]
        logits = self.model.forward(spans, self.pool)
        for item in step.items:
            if item.send_pages:
                self.transfers.chunk(item.rid, item.send_pages, item.send_first)
        if self.number:
            return ()
        return tuple(
            sample(item.rid, row, item.sampling, item.start + len(item.tokens))
            for item, row in zip(step.items, logits, strict=True)
            if item.sampling is not None
        )

    def check(self) -> None:
        """Raise when a thread of the endpoint or of its link has ended: no transfer would succeed, or
        no peer be learnt of, from now on."""
        if self.link is not None and self.link.failed:
            raise RuntimeError(self.link.failed)

    @property
    def told_to_drain(self) -> bool:
        """The endpoint takes no new transfers."""
        return self.link is not None and self.link.endpoint.draining

    @property
    def card(self) -> RankCard | None:
        """The endpoint's card."""
        return self.link.endpoint.card if self.link is not None else None

    def introduce(self, cards: Sequence[RankCard]) -> None:
        """Make a peer pod known to the endpoint."""
        if self.link is not None:
            self.link.endpoint.introduce(cards)

    def drain(self) -> None:
        """Take no new transfers."""
        if self.link is not None:
            self.link.endpoint.drain()

    def close(self) -> None:
        """Give up the link, then the endpoint, then the process group."""
        if self.link is not None:
            self.link.stop()
            self.link.endpoint.close()
        self.collective.close()


def build_rank(configure: Configure, started: float) -> Rank:
    """Load everything; SetupError when the checkpoint or the flags don't allow it."""
    options, number = configure.options, configure.rank
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = load_config(options.model_path)
    config.check_tensor_parallel(options.tp_size)
    dtype = torch_dtype(config.dtype if options.dtype == "auto" else options.dtype)
    collective = make_collective(number, options.tp_size, configure.meeting, COLLECTIVE_TIMEOUT_S)
    model = LlamaShard(config, options.model_path, number, collective, dtype)
    pool = make_pool(config, options, number, dtype)
    wake = Wake()
    link = None
    if options.disaggregated:
        # NIXL and the control channel are loaded only where KV moves.
        from pdtransfer.engines.reference.link import connect

        try:
            link = connect(options, config, pool, number, dtype_name(dtype), wake.set)
        except AgentError as error:  # names the plugin, parameter or device that NIXL can not use
            raise SetupError(error.message) from error
    transfers = RankTransfers(number, link.endpoint if link else None)
    facts = read_facts(model, pool, started, link)
    log.info("loaded in %.1f s: %s", facts.load_seconds, facts)
    return Rank(number, model, pool, collective, transfers, facts, link, wake)


def make_pool(config: LlamaConfig, options: Options, number: int, dtype: torch.dtype) -> PagedKVPool:
    """The pool of `max_total_tokens` tokens (whole pages)."""
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else torch_dtype(options.kv_cache_dtype)
    shape = PoolShape(
        layers=config.layers,
        pages=options.max_total_tokens // options.page_size,
        page_tokens=options.page_size,
        heads=config.kv_slice(number, options.tp_size),
        head_dim=config.head_dim,
    )
    return PagedKVPool(shape, kv_dtype, options.kv_memory)


def read_facts(model: LlamaShard, pool: PagedKVPool, started: float, link: Link | None) -> RankFacts:
    """What the rank is, read from its tensors and its process."""
    keys = pool.keys[0]
    regions = pool.regions()
    return RankFacts(
        pid=os.getpid(),
        kv_dtype=dtype_name(keys.dtype),
        dtype=dtype_name(model.embedding.dtype),
        page_tokens=keys.shape[1],
        pages=keys.shape[0],
        kv_bytes=sum(r.item_bytes * r.items for r in regions),
        kv_heads=keys.shape[2],
        memory_kinds=tuple(sorted({r.memory.value for r in regions if r.memory})),
        emulated_vram=pool.emulated_vram,
        load_seconds=round(time.monotonic() - started, 3),
        rss_bytes=_rollup("Rss"),
        pss_bytes=_rollup("Pss"),
        control=link.endpoint.card.control if link else "",
    )


def _rollup(what: str) -> int:
    """A line of /proc/self/smaps_rollup in bytes, 0 where the kernel does not show it."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith(f"{what}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
