"""One request inside the leader: what was asked, where it stands, what it told the client so far."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pdtransfer.engines.reference.messages import Sampled, Sampling, TransferUpdate
from pdtransfer.engines.reference.problems import RequestError, failed_transfer
from pdtransfer.session.api import TransferState


class Phase(StrEnum):
    """Where a request stands. ENDED ones only wait until their pages may return."""

    WAITING = "Waiting"
    RECEIVING = "Receiving"
    RUNNING = "Running"
    SENDING = "Sending"
    ENDED = "Ended"


@dataclass(frozen=True)
class Asked:
    """A checked request. `bootstrap` is host:port; room and bootstrap only in a disaggregated engine."""

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    room: int | None = None
    bootstrap: str = ""


@dataclass(frozen=True)
class Output:
    """News of a request: a token, its end (`finish`), or its failure (`error`)."""

    rid: str
    sampled: Sampled | None = None
    finish: dict[str, object] | None = None
    error: RequestError | None = None


@dataclass
class Transfer:
    """A request's transfer over all ranks: done when all are, failed when one is."""

    ranks: int
    updates: dict[int, TransferUpdate] = field(default_factory=dict)
    aborted: bool = False

    @property
    def succeeded(self) -> bool:
        """Every rank has succeeded."""
        states = [u.state for u in self.updates.values()]
        return len(states) == self.ranks and all(s is TransferState.SUCCESS for s in states)

    @property
    def failure(self) -> TransferUpdate | None:
        """The failed rank whose reason says most (not an abort that another rank's failure caused)."""
        failed = [u for u in self.updates.values() if u.state is TransferState.FAILED]
        return min(failed, key=lambda u: (u.reason == "Aborted", u.rank), default=None)

    @property
    def settled(self) -> bool:
        """No rank may still read or write the request's pages."""
        return len(self.updates) == self.ranks and all(u.releasable for u in self.updates.values())


@dataclass
class Request:
    """Mutable state of one request in the scheduler. `computed` counts tokens whose KV is in the pool."""

    asked: Asked
    deadline: float
    phase: Phase = Phase.WAITING
    pages: tuple[int, ...] = ()
    computed: int = 0
    sent_pages: int = 0
    generated: list[int] = field(default_factory=list)
    in_step: bool = False
    transfer: Transfer | None = None

    @property
    def prefilling(self) -> bool:
        """Part of the prompt is not computed yet."""
        return self.computed < len(self.asked.prompt)

    def finish_reason(self, token: int) -> dict[str, object] | None:
        """SGLang's finish_reason when `token` (the newest of `generated`) is the last one, else None."""
        if token in self.asked.stop_ids:
            return {"type": "stop", "matched": token}
        if len(self.generated) >= self.asked.max_new_tokens:
            return {"type": "length", "length": len(self.generated)}
        return None


def prompt_digest(prompt: Sequence[int]) -> str:
    """Digest of the token ids: both sides must have tokenized the same."""
    return hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in prompt)).hexdigest()[:32]


def pack_metadata(prompt: Sequence[int], first: Sampled) -> bytes:
    """What prefill tells decode after the bytes: the first token and what it was computed from."""
    return json.dumps(
        {
            "version": 1,
            "first_token": first.token,
            "logprob": first.logprob,
            "top_logprobs": first.top,
            "prompt_tokens": len(prompt),
            "prompt_digest": prompt_digest(prompt),
        }
    ).encode()


def unpack_metadata(rid: str, prompt: Sequence[int], metadata: bytes | None) -> Sampled:
    """The first token; RequestError when the metadata is not of this very prompt."""
    try:
        data = json.loads(metadata or b"")
        found = (int(data["prompt_tokens"]), str(data["prompt_digest"]))
        first = Sampled(
            rid,
            int(data["first_token"]),
            None if data["logprob"] is None else float(data["logprob"]),
            tuple((float(p), int(t)) for p, t in data["top_logprobs"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise failed_transfer("BadMetadata", f"the prefill's metadata can not be read: {error}") from error
    if found != (len(prompt), prompt_digest(prompt)):
        raise failed_transfer(
            "PromptMismatch",
            f"prefill computed {found[0]} tokens (digest {found[1]}), decode was asked about {len(prompt)} "
            f"(digest {prompt_digest(prompt)}): the two sides' tokenizers or requests differ",
        )
    return first
