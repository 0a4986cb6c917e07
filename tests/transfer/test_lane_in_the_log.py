"""Who runs without an operator learns from the log what moves the KV: a fallback to TCP is never silent."""

from __future__ import annotations

import logging

import pytest
from kv_world import World, until

from pdtransfer.session.proofs import logger


@pytest.mark.parametrize(("named", "level"), [(None, logging.WARNING), ("lo", logging.INFO)])
def test_each_side_says_once_what_moves_the_kv(
    world: World, caplog: pytest.LogCaptureFixture, named: str | None, level: int
) -> None:
    """A warning, unless the devices were named: whoever names lo does not wait for RDMA."""
    caplog.set_level(logging.INFO, logger.name)
    (prefill,), (decode,) = world.pair(net_devices=named)
    proofs = decode.endpoint.counters["probes{outcome=succeeded}"]
    decode.endpoint.probe()
    assert until(lambda: decode.endpoint.counters["probes{outcome=succeeded}"] > proofs)
    for rank, peer in ((prefill, decode), (decode, prefill)):
        name = rank.endpoint.card.agent_name
        told = [r for r in caplog.records if r.getMessage().startswith(f"{name}: KV between here and ")]
        assert [r.levelno for r in told] == [level]
        assert f"{peer.endpoint.card.pod_uid}/{peer.endpoint.card.rank}" in told[0].getMessage()
        assert "goes over TCP or shared memory" in told[0].getMessage()
        assert "no HCA here" in told[0].getMessage()
