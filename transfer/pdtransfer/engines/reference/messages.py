"""What the leader and its ranks tell each other over a pipe: frozen data, pickled (one trust domain).

Every rank gets every leader message in the same order, so that the collectives line up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pdtransfer.engines.reference.options import Options
from pdtransfer.session.api import TransferState

if TYPE_CHECKING:
    from pdtransfer.contract.card import RankCard


@dataclass(frozen=True)
class Configure:
    """First message: which rank this is, and everything it needs to load."""

    options: Options
    rank: int
    meeting: Path
    """File at which the ranks' process group meets."""


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. `temperature` 0 is greedy; `seed` makes a draw repeatable."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    logprob: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True)
class StepItem:
    """Tokens of one request in a step. `sampling` None: more of the prompt follows.
    `send_pages`: prompt pages that are finished after this step, `send_first` the first one's index."""

    rid: str
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    sampling: Sampling | None = None
    send_pages: tuple[int, ...] = ()
    send_first: int = 0


@dataclass(frozen=True)
class Step:
    """One forward pass over several requests."""

    number: int
    items: tuple[StepItem, ...]


@dataclass(frozen=True)
class SendOpen:
    """Prefill: expect a decode to ask for `room`; `tokens` of KV will be handed over in chunks."""

    rid: str
    room: int
    tokens: int


@dataclass(frozen=True)
class SendFinish:
    """Prefill: no more chunks; `metadata` follows the bytes."""

    rid: str
    metadata: bytes


@dataclass(frozen=True)
class Receive:
    """Decode: ask the prefill at `bootstrap` for `room` into `pages`."""

    rid: str
    room: int
    attempt: int
    bootstrap: str
    pages: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class AbortTransfer:
    """Give up the request's transfer."""

    rid: str
    reason: str


@dataclass(frozen=True)
class Introduce:
    """Cards of a peer pod, from a bootstrap exchange."""

    cards: tuple[RankCard, ...]


@dataclass(frozen=True)
class Drain:
    """Take no new transfers."""


@dataclass(frozen=True)
class Stop:
    """End the rank."""


LeaderMessage = Introduce | Step | SendOpen | SendFinish | Receive | AbortTransfer | Drain | Stop


@dataclass(frozen=True)
class RankFacts:
    """Read back from a rank that runs."""

    pid: int
    kv_dtype: str
    dtype: str
    page_tokens: int
    pages: int
    kv_bytes: int
    kv_heads: int
    memory_kinds: tuple[str, ...]
    emulated_vram: bool
    load_seconds: float
    rss_bytes: int
    pss_bytes: int
    control: str = ""


@dataclass(frozen=True)
class RankReady:
    """The rank has loaded and takes messages."""

    rank: int
    facts: RankFacts
    card: RankCard | None = None


@dataclass(frozen=True)
class RankFailed:
    """The rank ends. `setup`: what it was given is wrong (exit code 2), else a crash."""

    rank: int
    setup: bool
    text: str


@dataclass(frozen=True)
class Sampled:
    """One chosen token with its log probability and the best alternatives (log probability, id)."""

    rid: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class StepDone:
    """A rank finished a step; only rank 0 reports, after it handed over the step's pages."""

    number: int
    sampled: tuple[Sampled, ...]


@dataclass(frozen=True)
class TransferUpdate:
    """State of one request's transfer on one rank; sent when it changed. `releasable` False: a late
    write may still land in (or a read still run over) its pages."""

    rank: int
    rid: str
    state: TransferState
    releasable: bool
    reason: str = ""
    message: str = ""
    metadata: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class RankDraining:
    """The rank's endpoint was told to drain by its sidecar."""

    rank: int


RankMessage = RankReady | RankFailed | StepDone | TransferUpdate | RankDraining
