"""What is moved in a measurement, and between how many ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Transport = Literal["shm", "tcp"]
MIB = 1 << 20


@dataclass(frozen=True)
class Model:
    """KV geometry: 64 KiB a token with the defaults."""

    layers: int = 16
    heads: int = 8
    dim: int = 128
    item: int = 2
    """Bytes of a number (bf16)."""

    @property
    def regions(self) -> int:
        """K and V of every layer."""
        return 2 * self.layers

    @property
    def head_bytes(self) -> int:
        """One token of one head in one region."""
        return self.dim * self.item

    @property
    def token_bytes(self) -> int:
        """One token over all regions and heads."""
        return self.regions * self.heads * self.head_bytes


@dataclass(frozen=True)
class Setup:
    """Rank processes that are started together: a transport, TP of both sides, a page size, a pool."""

    transport: Transport
    prefill: int
    decode: int
    page: int = 16
    pool_tokens: int = 8192
    decode_pods: int = 1
    model: Model = field(default_factory=Model)

    @property
    def tp(self) -> str:
        """For tables."""
        return f"{self.prefill}-{self.decode}"

    @property
    def unequal(self) -> bool:
        """Slices differ."""
        return self.prefill != self.decode

    @property
    def pool_pages(self) -> int:
        """Pages of every rank's pool."""
        return self.pool_tokens // self.page

    @property
    def parts(self) -> int:
        """(prefill rank, decode rank) pairs of one decode engine that share heads."""
        return max(self.prefill, self.decode)

    @property
    def piece(self) -> int:
        """Bytes of one region that a pair shares: of one token at unequal TP, of a page at equal TP."""
        row = self.model.heads // self.parts * self.model.head_bytes
        return row if self.unequal else row * self.page

    @property
    def strategies(self) -> tuple[str, ...]:
        """What may be forced here."""
        if not self.unequal:
            return ()
        return ("sliced", "staged", "merge" if self.prefill > self.decode else "split")


@dataclass(frozen=True)
class Load:
    """Requests of a measurement: `concurrent` of `tokens` each, all started at once."""

    tokens: int
    concurrent: int = 1

    def nbytes(self, setup: Setup) -> int:
        """Over all requests and ranks."""
        return self.tokens * self.concurrent * setup.model.token_bytes

    def pages(self, setup: Setup) -> int:
        """Of one request."""
        return -(-self.tokens // setup.page)


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    setup: Setup
    load: Load
    rounds: int
    forced: bool = False
    """Every strategy is measured too, to judge the choice."""
    sglang: bool = False
    printed_only: bool = False
    """No bar is judged on it."""

    @property
    def label(self) -> str:
        """Short and unique."""
        many = f" x{self.load.concurrent}" if self.load.concurrent > 1 else ""
        return f"{self.setup.transport} {self.setup.tp} p{self.setup.page} {self.load.tokens}t{many}"


@dataclass(frozen=True)
class Plan:
    """A run: cells by the setup that serves them, and setups for fairness between two decode engines."""

    cells: tuple[Cell, ...]
    fairness: tuple[Setup, ...]

    def by_setup(self) -> dict[Setup, list[Cell]]:
        """In the order of first use."""
        found: dict[Setup, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.setup, []).append(cell)
        return found


EQUAL = ((1, 1), (2, 2))
UNEQUAL = ((2, 1), (1, 2))
WIDE = ((4, 1), (1, 4))
BULK, SMALL, LONG = 4096, 64, 32768


def tiny_pages(transport: Transport, rounds: int) -> list[Cell]:
    """Equal TP with pages of one token, SGLang's default: 131,072 pieces of 2 KiB."""
    return [Cell(Setup(transport, 1, 1, page=1), Load(BULK), rounds)]


def full(rounds: int = 5) -> Plan:
    """The issue's table."""
    cells: list[Cell] = []
    for transport in ("shm", "tcp"):
        for prefill, decode in (*EQUAL, *UNEQUAL, *WIDE):
            wide = (prefill, decode) in WIDE
            for page in (16,) if wide else (16, 64):
                setup = Setup(transport, prefill, decode, page)
                base = Cell(
                    setup, Load(BULK), rounds, forced=setup.unequal, sglang=page == 16 and not wide, printed_only=wide
                )
                cells.append(base)
                cells.append(replace(base, load=Load(SMALL), rounds=4 * rounds))
        cells += tiny_pages(transport, rounds)
        for prefill, decode in ((1, 1), (2, 1)):
            large = Setup(transport, prefill, decode, 16, pool_tokens=2 * LONG)
            cells.append(Cell(large, Load(LONG), max(2, rounds // 2)))
            cells.append(Cell(large, Load(BULK), rounds))
            cells.append(Cell(large, Load(BULK, 16), max(2, rounds // 2)))
    return Plan(tuple(cells), tuple(Setup(t, 1, 1, decode_pods=2) for t in ("shm", "tcp")))


def quick(rounds: int = 3) -> Plan:
    """One page size, the pairs whose bars matter most, 16 concurrent requests of 256 tokens."""
    cells: list[Cell] = []
    for transport in ("shm", "tcp"):
        for prefill, decode in ((1, 1), *UNEQUAL):
            setup = Setup(transport, prefill, decode)
            base = Cell(setup, Load(BULK), rounds, forced=setup.unequal, sglang=True)
            cells.append(base)
            cells.append(replace(base, load=Load(SMALL), rounds=3 * rounds))
            if (prefill, decode) == (2, 1):
                cells.append(replace(base, load=Load(256), forced=False, sglang=False))
                cells.append(replace(base, load=Load(256, 16), forced=False, sglang=False))
        cells += tiny_pages(transport, rounds)
    return Plan(tuple(cells), (Setup("shm", 1, 1, decode_pods=2),))
