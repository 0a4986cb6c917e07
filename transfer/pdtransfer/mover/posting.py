"""One item handed to the agent, with the descriptor lists made for it alone, if it brought its own."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from pdtransfer.agent.port import AgentFailure, AgentPort, Handle, Prepared
from pdtransfer.mover.jobs import Batch, Item, Job


def post(agent: AgentPort, job: Job, item: Item) -> tuple[Handle, tuple[Prepared, ...]]:
    """Post it; returns the handle and the lists to release with it. Raises AgentFailure: what was posted
    may still use its lists, else they are released."""
    if not isinstance(item, Batch):
        handle = agent.post(job.operation, item.local, item.local_indices, item.remote, item.remote_indices)
        return handle, ()
    lists: tuple[Prepared, ...] = ()
    try:
        lists = (agent.prepare(None, item.local, item.local_kind),)
        lists += (agent.prepare(job.peer, item.remote, item.remote_kind),)
        order = np.arange(len(item.local), dtype=np.int32)
        return agent.post(job.operation, lists[0], order, lists[1], order), lists
    except AgentFailure as error:
        if not error.posted:
            with suppress(AgentFailure):
                for made in lists:
                    agent.release_prepared(made)
        raise
