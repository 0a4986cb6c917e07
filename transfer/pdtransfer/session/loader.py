"""A peer's card in the agent: loaded, connected, and made anew when NIXL lost the connection."""

from __future__ import annotations

import base64
import contextlib

from pdtransfer.agent.port import AgentFailure
from pdtransfer.peers import Peer
from pdtransfer.session.core import Core

Refusal = tuple[str, str]
"""Reason and message."""


def load(core: Core, peer: Peer) -> Refusal | None:
    """Hand the card to the agent and connect eagerly; None when it took it."""
    agent, card = core.agent, peer.card
    try:
        name = agent.add_peer(base64.b64decode(card.nixl_metadata, validate=True))
    except AgentFailure as error:
        return "AgentError", error.message
    except ValueError as error:
        return "AgentError", f"the metadata is not base64: {error}"
    if name != card.agent_name:
        with contextlib.suppress(AgentFailure):
            agent.remove_peer(name)
        return "AgentError", f"the metadata is agent {name}'s, the card says {card.agent_name}"
    peer.loaded = True
    with contextlib.suppress(AgentFailure):  # the probe will say what is wrong
        agent.connect(name)
    return None


def reload(core: Core, peer: Peer) -> Refusal | None:
    """Remove and add: the only cure after nixlRemoteDisconnectError."""
    peer.reload = peer.loaded = False
    core.count("peer_reloads")
    unload(core, peer)
    return load(core, peer)


def unload(core: Core, peer: Peer) -> None:
    """Forget it. No fence: what was posted may still land."""
    with contextlib.suppress(AgentFailure):
        core.agent.remove_peer(peer.card.agent_name)
