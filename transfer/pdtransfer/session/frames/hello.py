"""The first frames of a connection, and keep-alive."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdtransfer.contract.card import first_agent
from pdtransfer.session.frames.base import BareFrame, Text


class Hello(BareFrame):
    """First frame of the dialling side: who it is and whom it means."""

    t: Literal["hello"] = "hello"
    cluster_uid: str
    pod_uid: str
    incarnation: str
    rank: int
    agent_name: str
    generation: int = Field(default=0, ge=0, lt=1 << 31)
    layout_hash: str
    to_pod_uid: str
    to_incarnation: str
    to_rank: int

    @property
    def first_agent(self) -> str:
        """Name of the incarnation's first agent."""
        return first_agent(self.agent_name, self.generation)


class Welcome(BareFrame):
    """The accepting side is whom the dialling side means, and its roster names the other."""

    t: Literal["welcome"] = "welcome"
    pod_uid: str
    incarnation: str
    rank: int
    agent_name: str


class Refused(BareFrame):
    """The connection is not wanted; it ends after this frame. `drained`: the answering rank is the
    one that was meant, has nothing in flight to the dialling agent, and will post nothing to it."""

    t: Literal["refused"] = "refused"
    reason: Text
    message: Text = ""
    drained: bool = False


class Ping(BareFrame):
    """Are you there?"""

    t: Literal["ping"] = "ping"


class Pong(BareFrame):
    """Yes."""

    t: Literal["pong"] = "pong"
