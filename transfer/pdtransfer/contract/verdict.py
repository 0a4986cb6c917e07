"""What a rank found out about a peer it was told to wire to."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pdtransfer.contract.base import ContractModel, Role


class VerdictState(StrEnum):
    """Wired is positive proof (bytes moved and their checksum matched); Refused and Unreachable
    are positive evidence against; Probing is neither yet."""

    PROBING = "Probing"
    WIRED = "Wired"
    REFUSED = "Refused"
    UNREACHABLE = "Unreachable"


class Verdict(ContractModel):
    """One local rank's view of one peer rank, for exactly these two incarnations.

    `bytes_moved` / `seconds` are of the probe: READs of first and last pool pages and a WRITE
    to scratch, checksummed. `transport` is what is known of the lane, `evidence` how it is known."""

    rank: int
    incarnation: str
    peer_pod_uid: str
    peer_incarnation: str
    peer_rank: int
    state: VerdictState
    reason: str = ""
    message: str = ""
    bytes_moved: int = 0
    seconds: float = 0.0
    bandwidth: float = 0.0
    """Bytes per second of the probe's largest WRITE; 0 when it was not told."""
    checksum_ok: bool = False
    transport: str = ""
    evidence: str = ""
    emulated_vram: bool = False
    at: float = 0.0
    """Unix time of this finding."""


class PodVerdicts(ContractModel):
    """Answer of GET /v1/verdicts."""

    version: Literal[1] = 1
    cluster_uid: str
    pod_uid: str
    role: Role
    incarnation: str = ""
    roster_term: int = 0
    roster_counter: int = 0
    roster_hash: str = ""
    verdicts: tuple[Verdict, ...] = ()
    draining: bool = False
    inflight: int = 0
