"""A probe's questions and answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdtransfer.session.frames.base import BareFrame


class Sample(BareFrame):
    """`nbytes` at the start of one page of the `region`-th region of the peer's card."""

    region: int = Field(ge=0)
    page: int = Field(ge=0)
    nbytes: int = Field(gt=0)


class ProbeOpen(BareFrame):
    """Ask the peer to hash these samples of its pool and to lend a piece of scratch."""

    t: Literal["probe_open"] = "probe_open"
    seq: int
    samples: tuple[Sample, ...] = Field(max_length=64)


class ProbeGrant(BareFrame):
    """Scratch at `address`, `nbytes` long (0: none free, try later), and digests of the samples."""

    t: Literal["probe_grant"] = "probe_grant"
    seq: int
    address: int = 0
    nbytes: int = 0
    digests: tuple[str, ...] = ()


class ProbeHash(BareFrame):
    """Hash the samples again (they may have changed while they were read)."""

    t: Literal["probe_hash"] = "probe_hash"
    seq: int


class ProbeDigests(BareFrame):
    """Answer of ProbeHash."""

    t: Literal["probe_digests"] = "probe_digests"
    seq: int
    digests: tuple[str, ...]


class ProbeCheck(BareFrame):
    """Hash the lent scratch."""

    t: Literal["probe_check"] = "probe_check"
    seq: int


class ProbeChecked(BareFrame):
    """Answer of ProbeCheck."""

    t: Literal["probe_checked"] = "probe_checked"
    seq: int
    digest: str


class ProbeClose(BareFrame):
    """The scratch is not needed any more; `settled` tells that no write into it is in flight."""

    t: Literal["probe_close"] = "probe_close"
    seq: int
    settled: bool = True
