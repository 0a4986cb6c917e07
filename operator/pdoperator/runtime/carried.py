"""What goes into one reconcile of a PDCluster and comes out of it: nothing here is the truth, all of it may be lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdoperator.domain.actions import Memory
from pdoperator.domain.observed import Observed, PodAnswer
from pdoperator.kube.observe import Problem
from pdoperator.runtime.refused import Refused


@dataclass
class ClusterState:
    """What is carried from one reconcile of a PDCluster to the next; may be lost at any time."""

    namespace: str
    name: str
    uid: str
    memory: Memory = field(default_factory=Memory)
    problem: Problem | None = None
    errors: int = 0
    version: str = ""
    """resourceVersion of the PDCluster as read in this reconcile."""
    quiet: int = 0
    """Looks in a row that found nothing new, did nothing and wrote nothing."""
    answers: dict[str, PodAnswer] = field(default_factory=dict)
    seen: Observed | None = None
    """The last look, for peeks: only while nothing is under way."""
    stale: bool = False
    """The status of this reconcile was refused because the object had changed."""
    refused: Refused = field(default_factory=Refused)
    """Writes the API server refused, each with a backoff of its own."""


@dataclass(frozen=True)
class Result:
    """`gone`: the object is no more. `failed`: something was refused. `blind`: nothing could be seen or
    decided, so looking again is what has to back off; a refused write backs off alone, and pods go on
    being wired and routed meanwhile."""

    requeue_after: float = 5.0
    failed: bool = False
    gone: bool = False
    blind: bool = False
    peeks: int = 0
    """How many times `peek` may stand in for a look, because nothing is under way."""
