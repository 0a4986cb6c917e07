"""NIXL metadata that was damaged on its way is never handed to NIXL, which would not survive it."""

from __future__ import annotations

import base64
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from kv_world import ask, give, until

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session.api import TransferState


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
    assert decode.endpoint.wait_wired(20), decode.endpoint.verdicts
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(30) is TransferState.SUCCESS


@pytest.mark.parametrize("seed", range(8))
def test_any_flipped_bit_breaks_the_seal(world, seed):
    card = world.rank(Role.PREFILL).endpoint.card
    assert card.seal_broken is None
    broken = damaged(card, seed).seal_broken
    assert broken is not None and "metadata hash" in broken


@pytest.mark.nixl
def test_a_rank_over_real_nixl_survives_a_roster_of_damaged_cards_and_wires_the_whole_one(ranks):
    (prefill,), (decode,) = ranks.start(1, 1)
    whole = prefill.card
    bad = [
        damaged(whole, seed).model_copy(update={"pod_uid": f"damaged-{seed}", "bootstrap": "127.0.0.1:1"})
        for seed in range(40)
    ]
    decode.ask("peers", cards=[c.model_dump_json() for c in (*bad, whole)], wait=0.1)
    until = time.monotonic() + 60
    while True:
        found = {v["peer_pod_uid"]: (v["state"], v["reason"]) for v in decode.ask("verdicts")["verdicts"]}
        if {found.get(c.pod_uid) for c in bad} == {("Refused", "BrokenSeal")} and found[whole.pod_uid][0] == "Wired":
            break
        assert time.monotonic() < until, found
        time.sleep(0.05)
    decode.ask("receive", room=1, pages=[4])
    prefill.ask("send", room=1, pages=[1])
    assert decode.ask("wait", room=1)["state"] == "Success"
    assert decode.ask("close") == {"closed": True}


CHILD = """
import sys
import numpy as np
from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.contract.base import MemoryKind

memory = np.zeros(4096, dtype=np.uint8)
peer, loader = NixlAgent("peer"), NixlAgent("loader")
peer.register(np.array([[memory.ctypes.data, 4096, 0]], dtype=np.uint64), MemoryKind.DRAM)
data = bytearray(peer.metadata())
# "|c", eight bytes of length, then UCX's worker address, whose first byte has its version.
data[data.index(b"|c") + 10] ^= int(sys.argv[1])
loader.add_peer(bytes(data))
print("loaded")
"""


@pytest.mark.nixl
@pytest.mark.parametrize(("flip", "ends"), [(0, 0), (2, -6)])
def test_why_the_seal_is_needed_one_flipped_bit_ends_the_process_that_loads_it(flip, ends):
    """UCX asserts what it reads (SIGABRT); other bits end in SIGSEGV. With no bit flipped the same code loads it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "FATAL", "UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}
    ran = subprocess.run([sys.executable, "-c", CHILD, str(flip)], capture_output=True, text=True, timeout=60, env=env)
    assert ran.returncode == ends, (ran.returncode, ran.stderr[-2000:])
    assert ("loaded" in ran.stdout) is (ends == 0)


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
