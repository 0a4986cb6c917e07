"""Every argument of every call that an engine makes: a bad one is refused at once, by name, and costs nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kv_world import BOOTSTRAP, QUICK, READY, TOKENS, Pool, ask, give, template, until

from pdtransfer.agent.fake import FakeHub
from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.errors import BadInput, LayoutMismatch, TransferError
from pdtransfer.session.api import EndpointConfig, PoolRegion, Timeouts, TransferState
from pdtransfer.session.endpoint import RankEndpoint

SUCCESS = TransferState.SUCCESS
CONFIG = EndpointConfig(listen_host="127.0.0.1", timeouts=QUICK)


class Maker:
    """Makes endpoints from good arguments with one of them changed; says how many agents were made."""

    def __init__(self) -> None:
        self.hub = FakeHub()
        self.pool = Pool(0, 1)
        self.made: list[str] = []

    def agent(self, name: str, _: EndpointConfig) -> Any:
        self.made.append(name)
        return self.hub.agent(name)

    def endpoint(self, **changed: object) -> RankEndpoint:
        given: dict[str, Any] = {
            "card_template": template(Role.PREFILL, self.pool, "i1"),
            "pool": self.pool.regions,
            "config": CONFIG,
            "agent_factory": self.agent,
        }
        return RankEndpoint(**(given | changed))


@pytest.fixture
def maker() -> Maker:
    return Maker()


REGION = {
    "layer": (-1, 1.0, "0", None, True, 1 << 40),
    "kind": ("Q", "", None, 3, "k"),
    "address": (0, -4096, 1 << 64, None, 1.5, "0x1000"),
    "item_bytes": (0, -1, None, 64.0, 1 << 60),
    "items": (0, -1, None, "8", 1 << 60),
    "memory": ("GPU", "", None, "dram", 1),
    "device": (-1, None, 0.5, 1 << 40),
    "draft": (None, 1, "no"),
    "pool": (None, 3),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REGION.items() for v in values])
def test_a_region_that_makes_no_sense_is_named(maker, field, value):
    regions = maker.pool.regions
    regions[2] = replace(regions[2], **{field: value})
    with pytest.raises(BadInput, match=rf"pool\[2\]\.{field}"):
        maker.endpoint(pool=regions)
    assert maker.made == []


def overlapping(regions: list[PoolRegion]) -> list[PoolRegion]:
    return [*regions[:1], replace(regions[1], address=regions[0].address + regions[0].item_bytes), *regions[2:]]


POOLS = {
    "none": (lambda r: [], "pool: no region"),
    "no list": (lambda r: 5, "pool: a list is needed"),
    "a text": (lambda r: "regions", "pool: a list is needed"),
    "no region": (lambda r: [*r, {"layer": 0}], r"pool\[4\]: a PoolRegion"),
    "overlapping": (overlapping, "overlap"),
    "the same memory twice": (lambda r: [*r, replace(r[0], layer=9)], "overlap"),
    "one inside another": (lambda r: [replace(r[0], address=4096, item_bytes=1 << 46), *r[1:]], "overlap"),
    "a layer twice": (lambda r: [*r, replace(r[0], address=r[0].address + (1 << 45))], r"is pool\[0\] already"),
    "beyond the address space": (lambda r: [replace(r[0], address=(1 << 64) - 8), *r[1:]], r"pool\[0\]\.items"),
}


@pytest.mark.parametrize("what", POOLS)
def test_a_pool_that_makes_no_sense_is_named(maker, what):
    change, told = POOLS[what]
    with pytest.raises(BadInput, match=told):
        maker.endpoint(pool=change(maker.pool.regions))
    assert maker.made == []


def test_emulated_vram_that_shares_host_memory_with_a_dram_region_is_an_overlap(maker):
    regions = maker.pool.regions
    shared = [*regions, replace(regions[0], memory="VRAM")]
    card = template(Role.PREFILL, maker.pool, "i1", emulated=True)
    with pytest.raises(BadInput, match="overlap"):
        maker.endpoint(pool=shared, card_template=card)


def test_a_layer_in_device_and_in_host_memory_is_two_regions(maker):
    """HiSparse: allowed. Real VRAM has addresses of its own."""
    regions = maker.pool.regions
    both = [*regions, replace(regions[0], memory="VRAM")]
    endpoint = maker.endpoint(pool=both)
    assert len(endpoint.card.layout.regions) == 5
    endpoint.close()


CARDS = {"pod_uid": "", "incarnation": ""}


@pytest.mark.parametrize("field", CARDS)
def test_a_template_without_identity_is_named(maker, field):
    card = template(Role.PREFILL, maker.pool, "i1").model_copy(update={field: ""})
    with pytest.raises(BadInput, match=rf"card_template\.{field}"):
        maker.endpoint(card_template=card)
    with pytest.raises(BadInput, match="card_template: a RankCard"):
        maker.endpoint(card_template=card.model_dump())


CONFIGS = {
    "listen_host": ("", None, 5),
    "advertise_host": ("", "0.0.0.0", "::", None),
    "control_port": (-1, 65536, "80", None, 1.5),
    "server_name": ("", None),
    "net_devices": ("", 5),
    "nixl_plugin": ("", None, 5),
    "nixl_params": (None, "engine_config=TLS=tcp", [("a", "b")], {1: "x"}, {"num_workers": 2}, {"": "x"}),
    "window_bytes": (0, -1, 1.5, None),
    "window_ops": (0, -1, True),
    "quarantine_cap": (-1, "8", 0.5),
    "staging_bytes": (-1, None, 1 << 10),
    "staging_slot_bytes": (0, -1, None),
    "strategy": ("fast", "", None, "direct"),
    "digest": (None, 1, "yes"),
    "tls_dir": ("", 5, "/nonexistent-tls"),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in CONFIGS.items() for v in values])
def test_a_setting_that_makes_no_sense_is_named(maker, field, value):
    with pytest.raises(BadInput, match=rf"config\.{field}"):
        maker.endpoint(config=replace(CONFIG, **{field: value}))
    assert maker.made == []


@pytest.mark.parametrize("field", list(Timeouts.__dataclass_fields__))
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), None, "5", True])
def test_a_deadline_that_never_comes_is_named(maker, field, value):
    with pytest.raises(BadInput, match=rf"config\.timeouts\.{field}"):
        maker.endpoint(config=replace(CONFIG, timeouts=replace(QUICK, **{field: value})))


def test_a_tls_folder_names_the_files_it_lacks(maker, tmp_path):
    (tmp_path / "ca.crt").write_text("x")
    with pytest.raises(BadInput, match=r"has no tls\.crt, tls\.key"):
        maker.endpoint(config=replace(CONFIG, tls_dir=str(tmp_path)))


def test_every_setting_and_every_field_of_a_region_has_rows_here():
    assert set(CONFIGS) | {"timeouts"} == set(EndpointConfig.__dataclass_fields__)
    assert set(REGION) == set(PoolRegion.__dataclass_fields__)


def test_an_agent_that_can_not_be_made_is_raised_and_leaves_nothing(maker):
    def broken(name: str, _: EndpointConfig) -> Any:
        raise AgentFailure("nixlBackendError", "injected: no such device", posted=False)

    import threading

    before = threading.active_count()
    with pytest.raises(AgentFailure, match="no such device"):
        maker.endpoint(agent_factory=broken)
    assert until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("call", ["register", "metadata"])
def test_memory_that_can_not_be_registered_is_raised_and_its_agent_closed(maker, call):
    def broken(name: str, _: EndpointConfig) -> Any:
        agent = maker.hub.agent(name)

        def fails(*_: object) -> Any:
            raise AgentFailure("nixlBackendError", "injected: can not pin", posted=False)

        setattr(agent, call, fails)
        return agent

    with pytest.raises(AgentFailure, match="can not pin"):
        maker.endpoint(agent_factory=broken)
    assert maker.hub.agents == {}


RECEIVE = {
    "room": (None, "1", 1.0, True, 1 << 63),
    "attempt": (-1, None, 1.5, False),
    "bootstrap": (None, 8998, ""),
    "pages": (None, 4, "45", b"45", {4: 5}, [4.0, 5], [4, None], [4, -5], [4, True], {4, 5}, np.array([4.0, 5.0])),
    "first_page": (-1, None, 0.0, "0"),
    "tokens": (0, -1, None, 7.0, "7"),
    "memory": ("GPU", 1, ""),
    "pools": ([], "swa", {1: [2]}, {"swa": 3}, {"swa": [1.5]}),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in RECEIVE.items() for v in values])
def test_a_receive_with_a_bad_argument_is_refused_by_name(world, field, value):
    (prefill,), (decode,) = world.pair()
    good: dict[str, Any] = {"room": 1, "attempt": 0, "bootstrap": BOOTSTRAP, "pages": [4, 5], "tokens": 2 * TOKENS - 1}
    with pytest.raises(BadInput, match=field):
        decode.endpoint.receive(**(good | {field: value}))
    assert decode.endpoint.inflight == 0
    receiver = decode.endpoint.receive(**good)  # nothing was taken by the call that was refused
    give(prefill, 1, [1, 2])
    assert receiver.wait(30) is SUCCESS and decode.pool.holds(1, [4, 5])


@pytest.mark.parametrize(
    ("pages", "first_page", "tokens"),
    [([4, 99], 0, 7), ([4, 4], 0, 7), ([4, 5], 0, 4), ([4, 5], 1, 7), ([], 0, 7), ([4, 5, 6], 0, 7)],
)
def test_page_lists_that_do_not_fit_the_pool_or_the_prompt_take_no_page(world, pages, first_page, tokens):
    (prefill,), (decode,) = world.pair()
    with pytest.raises(LayoutMismatch):
        decode.endpoint.receive(
            room=1, attempt=0, bootstrap=BOOTSTRAP, pages=pages, first_page=first_page, tokens=tokens
        )
    receiver = ask(decode, 1, [4, 5])
    give(prefill, 1, [1, 2])
    assert receiver.wait(30) is SUCCESS


def test_page_lists_may_be_any_sequence_of_whole_numbers(world):
    (prefill,), (decode,) = world.pair()
    for room, pages in enumerate(((4, 5), range(6, 8), np.array([8, 9]), np.array([10, 11], dtype=np.int32)), 1):
        receiver = decode.endpoint.receive(
            room=room, attempt=0, bootstrap=BOOTSTRAP, pages=pages, tokens=np.int64(2 * TOKENS - 1)
        )
        give(prefill, room, [1, 2])
        assert receiver.wait(30) is SUCCESS, receiver.error
        assert decode.pool.holds(room, [int(p) for p in pages])


SEND = {"room": RECEIVE["room"], "tokens": RECEIVE["tokens"]}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in SEND.items() for v in values])
def test_a_send_with_a_bad_argument_is_refused_by_name(world, field, value):
    prefill = world.rank(Role.PREFILL)
    with pytest.raises(BadInput, match=field):
        prefill.endpoint.send(**({"room": 1, "tokens": 7} | {field: value}))
    assert prefill.endpoint.inflight == 0


CHUNK = {
    "pages": RECEIVE["pages"],
    "first_page": RECEIVE["first_page"],
    "ready": (None, True, lambda timeout: True),
    "pools": RECEIVE["pools"],
    "layers": (0, [0, 1], range(0, 4, 2), range(-1, 2), range(0)),
    "memory": RECEIVE["memory"],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in CHUNK.items() for v in values])
def test_a_chunk_with_a_bad_argument_is_refused_by_name_and_the_room_goes_on(world, field, value):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5])
    prefill.pool.fill(1, [1, 2])
    sender = prefill.endpoint.send(room=1, tokens=2 * TOKENS - 1)
    good: dict[str, Any] = {"pages": [1, 2], "first_page": 0, "ready": READY}
    with pytest.raises(BadInput, match=field) as caught:
        sender.chunk(**(good | {field: value}))
    assert caught.value.room == 1
    sender.chunk(**good)
    for bad in (None, "text", 5, ["a"]):
        with pytest.raises(BadInput, match="metadata"):
            sender.finish(bad)
    sender.finish(bytearray(b"m"))
    assert receiver.wait(30) is SUCCESS and receiver.metadata == b"m"
    assert decode.pool.holds(1, [4, 5])


def test_the_wrong_side_is_told_so(world):
    (prefill,), (decode,) = world.pair()
    with pytest.raises(BadInput, match="this is a decode rank"):
        decode.endpoint.send(room=1, tokens=7)
    with pytest.raises(BadInput, match="this is a prefill rank"):
        ask(prefill, 1, [4])


@pytest.mark.parametrize("peers", [None, 5, "card", {"a": 1}, [None], ["card"], [{"pod_uid": "x"}]])
def test_a_roster_that_is_none_changes_nothing(world, peers):
    (prefill,), (decode,) = world.pair()
    with pytest.raises(BadInput, match="peers"):
        decode.endpoint.apply_peers(peers)
    assert [v.state for v in decode.endpoint.verdicts] == ["Wired"]
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(30) is SUCCESS


def test_pods_to_probe_are_a_list(world):
    decode = world.rank(Role.DECODE)
    for bad in ("pod-uid", 5, [5], None):
        with pytest.raises(BadInput, match="pod_uids"):
            decode.endpoint.probe(bad)


def test_an_abort_may_give_any_reason(world):
    (prefill,), (decode,) = world.pair()
    for room, reason in enumerate(("", "é" * 500, None, 5, ValueError("x")), 1):
        sender = prefill.endpoint.send(room=room, tokens=7)
        sender.abort(reason)
        assert sender.wait(30) is TransferState.FAILED
        receiver = ask(decode, 100 + room, [4])
        receiver.abort(reason)
        assert receiver.wait(30) is TransferState.FAILED and until(lambda r=receiver: r.pages_releasable)
    assert prefill.endpoint.failed is None and decode.endpoint.failed is None


def test_every_refusal_is_one_of_the_modules_errors_and_a_value_error():
    assert issubclass(BadInput, TransferError) and issubclass(BadInput, ValueError)
    error = BadInput("pages: no", room=3).about(peer="p")
    assert str(error) == "BadInput: pages: no (room 3, peer p)" and MemoryKind("DRAM") is MemoryKind.DRAM
