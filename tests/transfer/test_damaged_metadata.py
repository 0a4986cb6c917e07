"""NIXL metadata that was damaged on its way: never handed to NIXL, and NIXL survives what gets there all the same."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from kv_world import ask, give, until

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session.api import TransferState

MUTATIONS = 80


def damaged(card: RankCard, seed: int = 1) -> RankCard:
    """One flipped bit of the metadata, the rest of the card as it was."""
    data = bytearray(base64.b64decode(card.nixl_metadata))
    rng = random.Random(seed)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return card.model_copy(update={"nixl_metadata": base64.b64encode(bytes(data)).decode()})


def test_damaged_metadata_never_reaches_the_agent_and_the_whole_card_wires_afterwards(world):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    prefill.endpoint.apply_peers([decode.endpoint.card])
    loaded: list[bytes] = []
    real = decode.agent.add_peer
    decode.agent.add_peer = lambda metadata: (loaded.append(metadata), real(metadata))[1]  # type: ignore[method-assign]
    decode.endpoint.apply_peers([damaged(prefill.endpoint.card)])
    assert until(lambda: decode.endpoint.verdicts and decode.endpoint.verdicts[0].state is not VerdictState.PROBING)
    (verdict,) = decode.endpoint.verdicts
    assert (verdict.state, verdict.reason) == (VerdictState.REFUSED, "BrokenSeal") and "damaged" in verdict.message
    assert loaded == []
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert decode.endpoint.wait_wired(5), decode.endpoint.verdicts
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(3) is TransferState.SUCCESS


@pytest.mark.parametrize("seed", range(8))
def test_any_flipped_bit_breaks_the_seal(world, seed):
    card = world.rank(Role.PREFILL).endpoint.card
    assert card.seal_broken is None
    broken = damaged(card, seed).seal_broken
    assert broken is not None and "metadata hash" in broken


CHILD = """
import faulthandler, json, random, sys, time
faulthandler.enable()
import numpy as np
from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.base import MemoryKind

rng = random.Random(int(sys.argv[1]))
memory = np.zeros(1 << 16, dtype=np.uint8)
outcomes, slowest = {}, 0.0

def mutate(data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, how = rng.randrange(len(data)), rng.randrange(5)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at : at + rng.randrange(1, 32)]
        elif how == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 16))
        elif how == 3:
            data[at : at + 8] = rng.choice([b"\\xff" * 8, bytes(8), (1 << 62).to_bytes(8, "little")])
        else:
            data = data[: at + 1]
        if not data:
            data = bytearray(b"x")
    return bytes(data)

agent = None
for number in range(int(sys.argv[2])):
    if number % 10 == 0:
        agent = NixlAgent(f"loader-{number}")
    peer = NixlAgent(f"peer-{number}")
    rows = [[memory.ctypes.data + i * 4096, 4096, 0] for i in range(4)]
    peer.register(np.array(rows, dtype=np.uint64), MemoryKind.DRAM)
    began = time.monotonic()
    try:
        name = agent.add_peer(mutate(peer.metadata()))
        try:
            agent.connect(name)
        except AgentFailure:
            pass
        agent.progress()
        agent.remove_peer(name)
        result = "loaded"
    except AgentFailure as error:
        result = error.kind
    slowest = max(slowest, time.monotonic() - began)
    outcomes[result] = outcomes.get(result, 0) + 1
    peer.close()
print("RESULT", json.dumps({"outcomes": outcomes, "slowest": slowest}))
"""


@pytest.mark.nixl
def test_mutated_metadata_never_crashes_nor_hangs_a_process_with_real_nixl():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "FATAL", "UCX_NET_DEVICES": "lo"}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, "7", str(MUTATIONS)], capture_output=True, text=True, timeout=120, env=env
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.split("RESULT ")[1])
    assert sum(found["outcomes"].values()) == MUTATIONS
    assert len(found["outcomes"]) > 2, f"the mutations reached one branch only: {found}"
    assert found["slowest"] < 20, found  # a hang; the loop itself takes milliseconds


@pytest.mark.nixl
def test_why_the_seal_is_needed_nixl_can_not_load_an_agent_again_after_half_of_its_metadata(monkeypatch):
    """If this fails one day, NIXL has learned to clean up, and the seal is only the second line."""
    from pdtransfer.agent.nixl import NixlAgent
    from pdtransfer.agent.port import AgentFailure

    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    loader, peer = NixlAgent("damaged-loader"), NixlAgent("damaged-peer")
    memory = np.zeros(4096, dtype=np.uint8)
    peer.register(np.array([[memory.ctypes.data, 4096, 0]], dtype=np.uint64), MemoryKind.DRAM)
    whole = peer.metadata()
    with pytest.raises(AgentFailure):
        loader.add_peer(whole.replace(b"nixlSDList", b"nixlSDLisX"))
    loader.remove_peer("damaged-peer")
    with pytest.raises(AgentFailure, match="nixlInvalidParamError"):
        loader.add_peer(whole)
    fresh = NixlAgent("fresh-loader")
    assert fresh.add_peer(whole) == "damaged-peer"
    for agent in (loader, peer, fresh):
        agent.close()
