"""Compiled from _rows.c where setup found a compiler. Addresses and sizes are bytes; `indices` are int64,
contiguous. Raise ValueError for rows that are not aligned to 16 bytes, IndexError for a row past the end."""

from typing import Any

import numpy as np
import numpy.typing as npt

def pack(pool: int, rows: int, row_bytes: int, indices: npt.NDArray[np.signedinteger[Any]], slot: int, /) -> None: ...
def scatter(
    pool: int, rows: int, row_bytes: int, indices: npt.NDArray[np.signedinteger[Any]], slot: int, /
) -> None: ...
