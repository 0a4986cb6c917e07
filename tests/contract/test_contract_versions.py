"""Two versions of the contract side by side: what a newer peer adds must not break an older one."""

from __future__ import annotations

from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankLayout, Region, RegionKind
from pdtransfer.contract.roster import Roster, RosterKey
from pdtransfer.sidecar.rosters import parse


class NewerRegion(Region):
    released: bool = False


class NewerLayout(RankLayout):
    layer_wise: bool = False
    regions: tuple[NewerRegion, ...] = ()


class NewerModel(ModelIdentity):
    encoder: str = ""


class NewerCard(RankCard):
    layout: NewerLayout
    model: NewerModel
    streams: int = 0


def newer(**layout: object) -> NewerCard:
    return NewerCard(
        cluster_uid="c",
        pod_uid="p",
        role=Role.PREFILL,
        incarnation="i",
        model=NewerModel(name="m", dtype="bfloat16", layers=1),
        layout=NewerLayout(
            page_tokens=16,
            kv_dtype="bfloat16",
            heads=HeadSlice(first=0, count=1, total=1),
            regions=(NewerRegion(layer=0, kind=RegionKind.KEY, item_bytes=64, items=4, memory=MemoryKind.DRAM),),
            **layout,
        ),
        engine=EngineFacts(type=EngineType.REFERENCE, version="2", backend=Backend.PDCLUSTER),
        agent_name="a",
    ).sealed()  # type: ignore[return-value]


def test_an_older_peer_takes_a_newer_card_whose_new_fields_are_not_used() -> None:
    card = newer()
    seen = RankCard.model_validate_json(card.model_dump_json())
    assert seen.seal_broken is None


def test_an_older_peer_refuses_a_newer_card_that_uses_what_it_does_not_know() -> None:
    seen = RankCard.model_validate_json(newer(layer_wise=True).model_dump_json())
    assert seen.seal_broken is not None and "layout hash" in seen.seal_broken


def test_a_roster_of_newer_cards_has_the_same_hash_for_operator_and_sidecar_of_two_versions() -> None:
    roster = Roster(cluster_uid="c", pod_uid="d", incarnation="e", key=RosterKey(term=1, counter=1))
    new = roster.model_copy(update={"peers": {0: (newer(),)}})
    old = Roster.model_validate_json(new.model_dump_json())
    assert old.hash == new.hash == parse(new.model_dump_json().encode()).hash
