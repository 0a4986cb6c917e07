"""Descriptor lists: (N, 3) address, bytes, device, or NIXL's strided (N, 5) with stride and count.

A strided row stands for `count` blocks of `bytes` bytes, `stride` bytes apart. Blocks are numbered
row by row, and that number is the index a transfer names them by. Pure.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdtransfer.agent.port import AgentFailure, Descriptors, Indices

_U64 = (1 << 64) - 1


def _refuse(message: str) -> AgentFailure:
    return AgentFailure("nixlInvalidParamError", message, posted=False)


def checked(descriptors: Descriptors) -> Descriptors:
    """The same list as NIXL takes it (C-contiguous uint64); raises AgentFailure for any other shape
    and for an empty one, which NIXL's Python layer answers with errors of several kinds."""
    array = np.asarray(descriptors)
    if array.ndim != 2 or array.shape[1] not in (3, 5) or array.dtype.kind not in "ui":
        raise _refuse(f"descriptors of shape {array.shape} and type {array.dtype} are no (N, 3) or (N, 5) of uint64")
    if not len(array):
        raise _refuse("no descriptors")
    return np.ascontiguousarray(array, dtype=np.uint64)


class Blocks:
    """A checked list whose blocks can be looked up; nothing is expanded before it is asked for."""

    def __init__(self, descriptors: Descriptors) -> None:
        array = checked(descriptors)
        if array.shape[1] == 3:
            table = np.empty((len(array), 5), dtype=np.uint64)
            table[:, :3], table[:, 3], table[:, 4] = array, array[:, 1], 1
            array = table
        self._table = array.copy()
        self._ends = np.cumsum(array[:, 4], dtype=np.uint64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def within(self, regions: Descriptors) -> bool:
        """Every row has blocks, which do not overlap and lie in one region of their device, (R, 3)."""
        address, size, device, stride, count = self._table.T
        if (size == 0).any() or (count == 0).any() or (stride < size).any():
            return False
        with np.errstate(over="ignore"):
            if (count - 1 > (_U64 - address - size) // stride).any() or (address > _U64 - size).any():
                return False  # it would wrap around
            end = address + size + stride * (count - 1)
        inside = np.zeros(len(address), dtype=bool)
        for start, nbytes, on in regions:
            inside |= (address >= start) & (end <= start + nbytes) & (device == on)
        return bool(inside.all())

    def rows(self, indices: Indices) -> Descriptors:
        """The blocks of these numbers, (n, 3); raises AgentFailure for one that does not exist."""
        numbers: npt.NDArray[np.int64] = np.asarray(indices, dtype=np.int64)
        if numbers.ndim != 1 or not len(numbers):
            raise _refuse("no indices")
        if int(numbers.min()) < 0 or int(numbers.max()) >= len(self):
            raise _refuse(f"indices {int(numbers.min())}..{int(numbers.max())} of a list of {len(self)} blocks")
        row = np.searchsorted(self._ends, numbers.astype(np.uint64), side="right")
        found = self._table[row]
        nth = numbers.astype(np.uint64) - (self._ends[row] - found[:, 4])
        found[:, 0] += nth * found[:, 3]
        return np.ascontiguousarray(found[:, :3])
