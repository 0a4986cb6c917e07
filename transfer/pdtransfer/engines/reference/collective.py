"""Sums and gathers over the TP ranks of one engine: torch.distributed with gloo on loopback."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch


class Collective:
    """Size 1: every operation is the identity, and torch.distributed is never started."""

    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side along the last dimension."""
        return x

    def close(self) -> None:
        """Leave the group."""


class GlooCollective(Collective):
    """All ranks of one pod; they find each other through a file in a folder of the leader's.

    An operation whose peer died raises after `timeout_s`; the leader has ended the engine before."""

    def __init__(self, rank: int, size: int, meeting: Path, timeout_s: float) -> None:
        # A pod's host name may not resolve, and these ranks share one network namespace.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        import torch.distributed as dist

        self._dist = dist
        self.size = size
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(  # type: ignore[attr-defined]
                str(meeting), size
            ),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        x = x.contiguous()
        self._dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side along the last dimension."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()


def make_collective(rank: int, size: int, meeting: Path, timeout_s: float) -> Collective:
    """The group of `size` ranks that meets at the file `meeting`."""
    return Collective() if size == 1 else GlooCollective(rank, size, meeting, timeout_s)
