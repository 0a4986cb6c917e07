"""A rank's card: everything a peer and the operator need to know before KV moves to or from it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdtransfer.contract.base import Backend, ContractModel, EngineType, MemoryKind, Role, content_hash
from pdtransfer.contract.fingerprint import ModelIdentity, layout_fingerprint, metadata_fingerprint, pair_fingerprint
from pdtransfer.contract.layout import RankLayout


class EngineFacts(ContractModel):
    """Read back from the running engine, not from the flags it was given."""

    type: EngineType
    version: str
    backend: Backend = Backend.PDCLUSTER
    backend_emulated: bool = False
    """True when the Reference engine only holds itself to the limits of another backend."""
    nixl_version: str = ""
    nixl_plugin: str = "UCX"
    """NIXL's backend that the rank's agent was made with, and its parameters."""
    nixl_params: tuple[tuple[str, str], ...] = ()
    nixl_plugins: tuple[str, ...] = ()
    """The plugins that NIXL found in the image, in order of their names. Empty: not told."""
    speculative_algorithm: str = ""
    max_total_tokens: int | None = None
    settings: tuple[tuple[str, str | int | float | bool | None], ...] = ()
    """SGLang's settings as it resolved them, by its own names: those that some rule reads. Empty: not told."""


class StagingArena(ContractModel):
    """Registered memory beside the KV pool, in slots that this rank lends to the ranks that write to
    it: packed pieces land there and are scattered locally. `address` is bytes, slots lie back to back."""

    memory: MemoryKind
    device: int = Field(default=0, ge=0, lt=1 << 32)
    address: int = Field(ge=0, lt=1 << 64)
    slot_bytes: int = Field(gt=0, lt=1 << 40)
    slots: int = Field(gt=0, lt=1 << 20)


class RankProcess(ContractModel):
    """Which process a rank is, for ranks that could reach each other's memory without the other's help.

    `host` is the kernel's boot id, `pid_namespace` the inode of its PID namespace; `started` is the
    process' start in clock ticks after boot: a PID that is used again has another one."""

    host: str
    pid_namespace: int = Field(ge=0)
    pid: int = Field(gt=0)
    started: int = Field(ge=0)


def first_agent(name: str, generation: int) -> str:
    """Name of the first agent of an incarnation whose agent of that generation is `name`."""
    return name.removesuffix(f".{generation}") if generation else name


def later_agent(first: str, generation: int) -> str:
    """Name of the agent of a generation."""
    return f"{first}.{generation}" if generation else first


class RankCard(ContractModel):
    """One rank of one engine incarnation in one pod.

    `incarnation` is new at each engine start; every rank of an engine carries the same one.
    `control` is host:port of the rank's control channel, `bootstrap` what a request names as
    bootstrap_host:bootstrap_port (prefill only).
    """

    version: Literal[1] = 1
    cluster_uid: str
    pod_uid: str
    pod_name: str = ""
    role: Role
    revision: str = ""
    incarnation: str
    model: ModelIdentity
    layout: RankLayout
    engine: EngineFacts
    agent_name: str
    generation: int = Field(default=0, ge=0, lt=1 << 31)
    """How often the rank took a new agent in this incarnation; one after the first is named
    `<first agent's name>.<generation>`. The memory behind all of them is the same."""
    nixl_metadata: str = ""
    """base64 of the agent's metadata."""
    control: str = ""
    bootstrap: str = ""
    transports: tuple[str, ...] = ()
    """UCX_TLS as set in the rank; empty when UCX may choose."""
    process: RankProcess | None = None
    """None: not known, or many agents share one (test doubles)."""
    devices: tuple[str, ...] = ()
    """HCAs with a /dev/infiniband node in the pod: what RDMA could use, not what was used."""
    staging: tuple[StagingArena, ...] = ()
    """At most one arena a memory kind; none: this rank is written to in place only."""
    fingerprint: str = ""
    layout_hash: str = ""
    metadata_hash: str = ""
    """Of `nixl_metadata`: one flipped bit of it can end the process that loads it (UCX aborts), or keep that
    agent from ever being loaded."""

    @property
    def rank(self) -> int:
        """Unique rank number within the engine."""
        return self.layout.coordinates.index

    def sealed(self) -> RankCard:
        """This card with `fingerprint`, `layout_hash` and `metadata_hash` computed from its own content."""
        return self.model_copy(
            update={
                "fingerprint": pair_fingerprint(self.model, self.layout),
                "layout_hash": layout_fingerprint(self.layout),
                "metadata_hash": metadata_fingerprint(self.nixl_metadata),
            }
        )

    @property
    def first_agent(self) -> str:
        """Name of the incarnation's first agent: the same in all of its generations."""
        return first_agent(self.agent_name, self.generation)

    @property
    def seal_broken(self) -> str | None:
        """Why the card does not match its own hashes, or None. Such a card is never wired."""
        if self.fingerprint != pair_fingerprint(self.model, self.layout):
            return f"fingerprint {self.fingerprint or '(none)'} does not match the card's model and layout"
        if self.layout_hash != layout_fingerprint(self.layout):
            return f"layout hash {self.layout_hash or '(none)'} does not match the card's layout"
        if self.metadata_hash != metadata_fingerprint(self.nixl_metadata):
            return (
                f"metadata hash {self.metadata_hash or '(none)'} does not match the card's NIXL metadata: it is damaged"
            )
        return None


class RefusedRank(ContractModel):
    """A rank that the sidecar turned away lately. `rank` is None when its line could not be read."""

    rank: int | None = None
    reason: str
    message: str


class FailedRank(ContractModel):
    """A rank that lives and says that it can move no KV any more. Only a new start of its engine repairs that."""

    rank: int
    message: str


class PodCards(ContractModel):
    """Answer of GET /v1/cards: the ranks of one pod that are alive now.

    `expected_ranks` is how many the engine will have; a pod with fewer cards is still loading
    (or a rank died). `roster_key`/`roster_hash` tell what the pod holds."""

    version: Literal[1] = 1
    cluster_uid: str
    pod_uid: str
    role: Role
    incarnation: str = ""
    expected_ranks: int = Field(default=0, ge=0)
    cards: tuple[RankCard, ...] = ()
    roster_term: int = 0
    roster_counter: int = 0
    roster_hash: str = ""
    stale_ranks: tuple[int, ...] = ()
    """Ranks whose socket is open but whose heartbeat is late: Unreachable, not dead."""
    refused: tuple[RefusedRank, ...] = ()
    """Ranks that were turned away in the last seconds (broken seal, other pod ...)."""
    failed: tuple[FailedRank, ...] = ()
    """Ranks of this incarnation that say of themselves that they failed."""

    @property
    def complete(self) -> bool:
        """Every rank of the current incarnation has shown its card."""
        return self.expected_ranks > 0 and len(self.cards) == self.expected_ranks

    @property
    def digest(self) -> str:
        """ETag of this answer."""
        return content_hash(self.model_dump(mode="json"))
