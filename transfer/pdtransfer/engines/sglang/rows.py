"""SGLang's metadata rows (first token, its logprobs, the room ...) as the metadata that ends a transfer, and back.

Prefill has one row of a request in each of its buffers, decode one in each of its own. A trailer names whom the
bytes are of: a row of another room, attempt or incarnation is never written.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MAGIC = b"PDROWS1\n"
_SIZE = struct.Struct("<I")
MAX_ROWS = 64


class BadRows(ValueError):
    """The metadata can not be this request's rows; the message says why."""


@dataclass(frozen=True)
class Trailer:
    """Whom rows are of."""

    room: int
    attempt: int
    source: str
    destination: str


@dataclass(frozen=True)
class Buffers:
    """Addresses and bytes a row of the engine's metadata buffers, all in host memory, and rows in each."""

    addresses: tuple[int, ...]
    row_bytes: tuple[int, ...]
    rows: int

    def read(self, index: int) -> tuple[bytes, ...]:
        """Row `index` of every buffer."""
        self._check(index)
        return tuple(ctypes.string_at(a + n * index, n) for a, n in zip(self.addresses, self.row_bytes, strict=True))

    def write(self, index: int, rows: Sequence[bytes]) -> None:
        """Write row `index` of every buffer, before anyone is told of success.

        A row that is shorter or longer here is written as far as both reach: decode with a draft model of its
        own has a wider row of hidden states than prefill."""
        self._check(index)
        if len(rows) != len(self.addresses):
            raise BadRows(
                f"prefill has {len(rows)} metadata buffers, decode {len(self.addresses)}: an option that adds one is "
                "set on one side only (KV checksum, sampling mask, DSA top-k)"
            )
        for address, size, row in zip(self.addresses, self.row_bytes, rows, strict=True):
            ctypes.memmove(address + size * index, row, min(size, len(row)))

    def _check(self, index: int) -> None:
        if not 0 <= index < self.rows:
            raise BadRows(f"metadata row {index} is not in 0 .. {self.rows - 1}")


def pack(trailer: Trailer, rows: Sequence[bytes]) -> bytes:
    """Rows and trailer as one text of bytes."""
    sizes = [len(row) for row in rows]
    head = json.dumps({**asdict(trailer), "sizes": sizes}, separators=(",", ":")).encode()
    return b"".join((MAGIC, _SIZE.pack(len(head)), head, *rows))


def unpack(metadata: bytes) -> tuple[Trailer, tuple[bytes, ...]]:
    """Trailer and rows. Raises BadRows and names what is wrong."""
    start = len(MAGIC) + _SIZE.size
    if len(metadata) < start or not metadata.startswith(MAGIC):
        raise BadRows("these bytes are no metadata rows of pdcluster's SGLang backend")
    (size,) = _SIZE.unpack_from(metadata, len(MAGIC))
    try:
        head = json.loads(metadata[start : start + size])
        sizes = head.pop("sizes")
        trailer = Trailer(**head)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRows(f"the trailer can not be read: {error}") from None
    if not _good(trailer, sizes):
        raise BadRows("the trailer has a field of a wrong kind")
    body, at, rows = metadata[start + size :], 0, []
    if sum(sizes) != len(body):
        raise BadRows(f"the rows have {len(body)} bytes, the trailer says {sum(sizes)}")
    for n in sizes:
        rows.append(body[at : at + n])
        at += n
    return trailer, tuple(rows)


def _good(trailer: Trailer, sizes: object) -> bool:
    whole = type(trailer.room) is int and type(trailer.attempt) is int
    named = isinstance(trailer.source, str) and isinstance(trailer.destination, str)
    listed = isinstance(sizes, list) and len(sizes) <= MAX_ROWS and all(type(n) is int and n >= 0 for n in sizes)
    return whole and named and listed
