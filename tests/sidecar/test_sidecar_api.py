"""The control API's answers, over real HTTP on loopback (--insecure)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import pytest
from sidecar_kit import FakeEndpoint, card, peer, roster, running, until, verdict

from pdtransfer.contract.card import PodCards
from pdtransfer.contract.verdict import PodVerdicts
from pdtransfer.sidecar import api, serve
from pdtransfer.sidecar.main import Sidecar
from pdtransfer.sidecar.rank_link import RankLink


def http(sidecar: Sidecar) -> httpx.AsyncClient:
    assert sidecar.control is not None
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{sidecar.control.port}", timeout=20.0)


async def put(c: httpx.AsyncClient, r: object) -> httpx.Response:
    return await c.put("/v1/roster", content=r.model_dump_json())


async def test_from_first_card_to_ready_and_drained(tmp_path: Path) -> None:
    ends = [FakeEndpoint(card(0)), FakeEndpoint(card(1))]
    async with running(tmp_path) as sidecar, http(sidecar) as c, httpx.AsyncClient(timeout=20.0) as probe:
        health = f"http://127.0.0.1:{sidecar.health.port}"
        early = await put(c, roster())
        assert early.status_code == 412 and early.json()["reason"] == "OtherIncarnation"
        links = [RankLink(tmp_path / "s.sock", e, expected_ranks=2).start() for e in ends]
        try:
            await until(lambda: len(sidecar.hub.state.ranks) == 2)
            cards = PodCards.model_validate_json((await c.get("/v1/cards")).content)
            assert cards.complete and cards.cards == (card(0), card(1)) and cards.incarnation == "i1"
            r = roster((1, 7))
            taken = await put(c, r)
            assert taken.status_code == 200
            assert taken.json() == {"term": 1, "counter": 7, "hash": r.hash, "incarnation": "i1"}
            await until(lambda: all(e.applied for e in ends))
            assert [e.applied[-1] for e in ends] == [(peer(0),), (peer(1),)]
            assert (await put(c, r)).status_code == 200
            lower, other = roster((1, 6)), roster((1, 7), {0: (peer(0, "peer-2"),)})
            for bad, reason in ((lower, "LowerKey"), (other, "SameKeyOtherContent")):
                answer = await put(c, bad)
                assert answer.status_code == 409
                assert answer.json() | {"message": ""} == {
                    "reason": reason,
                    "message": "",
                    "term": 1,
                    "counter": 7,
                    "hash": r.hash,
                    "incarnation": "i1",
                }
            for bad, reason in (
                (roster((9, 9), pod_uid="x"), "OtherPod"),
                (roster((9, 9), incarnation="x"), "OtherIncarnation"),
            ):
                answer = await put(c, bad)
                assert (answer.status_code, answer.json()["reason"]) == (412, reason)

            assert (await probe.get(f"{health}/readyz")).status_code == 503
            for i, e in enumerate(ends):
                e.changed(verdicts=(verdict(i, peer(i)),))
            await until(lambda: sum(len(x.verdicts) for x in sidecar.hub.state.ranks) == 2)
            answer = await probe.get(f"{health}/readyz")
            assert (answer.status_code, answer.text) == (200, "ready\n")
            got = PodVerdicts.model_validate_json((await c.get("/v1/verdicts")).content)
            assert got.verdicts == (verdict(0, peer(0)), verdict(1, peer(1))) and got.roster_counter == 7

            assert (await c.post("/v1/probe", json={"pod_uids": ["peer-1"]})).json() == {"ranks": 2}
            await until(lambda: [e.probes for e in ends] == [[("peer-1",)], [("peer-1",)]])

            moved = {"bytes_total": [[["sent", "direct", "TCP"], [12.0]]], "bad name!": [[[], [1.0]]]}
            ends[1].changed(inflight=3, metrics=moved)
            await until(lambda: sidecar.hub.state.ranks[1].inflight == 3)
            await until(lambda: sidecar.hub.state.ranks[1].metrics)
            metrics = (await probe.get(f"{health}/metrics")).text
            labels = 'direction="sent",rank="1",role="prefill",strategy="direct",transport="TCP"'
            assert f"pdtransfer_bytes_total{{{labels}}} 12.0" in metrics and "bad name" not in metrics
            assert 'pdtransfer_rank_bad_samples{rank="1",role="prefill"} 1.0' in metrics
            assert 'pdtransfer_verdicts{state="Wired"} 2.0' in metrics
            assert 'pdtransfer_refused_rosters_total{reason="LowerKey"} 1.0' in metrics

            drained = PodVerdicts.model_validate_json((await c.post("/v1/drain")).content)
            assert drained.draining and drained.inflight == 3
            await until(lambda: all(e.drained for e in ends))
            ends[1].changed(inflight=0)
            await until(lambda: sidecar.hub.state.ranks[1].inflight == 0)
            assert "draining" in (await probe.get(f"{health}/readyz")).text
        finally:
            for link in links:
                link.stop()
        await until(lambda: not sidecar.hub.state.ranks)  # the sockets' end removed the cards
        assert PodCards.model_validate_json((await c.get("/v1/cards")).content).cards == ()


async def test_cards_answer_304_until_something_changed(tmp_path: Path) -> None:
    async with running(tmp_path) as sidecar, http(sidecar) as c:
        link = RankLink(tmp_path / "s.sock", FakeEndpoint(card(0, tp_size=1)), expected_ranks=1).start()
        try:
            await until(lambda: sidecar.hub.state.ranks)
            first = await c.get("/v1/cards")
            etag = first.headers["etag"]
            assert etag == f'"{PodCards.model_validate_json(first.content).digest}"'
            seen = sidecar.hub.state.ranks[0].seen
            await until(lambda: sidecar.hub.state.ranks[0].seen > seen)  # a heartbeat is no change
            for header in (etag, f"W/{etag}", f'"x", {etag}', "*"):
                again = await c.get("/v1/cards", headers={"if-none-match": header})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
            await put(c, roster(peers={0: (peer(0, tp_size=1),)}))
            changed = await c.get("/v1/cards", headers={"if-none-match": etag})
            assert changed.status_code == 200 and changed.headers["etag"] != etag
        finally:
            link.stop()


async def test_what_does_not_parse_is_answered_400_and_says_where(tmp_path: Path) -> None:
    def body(**changes: object) -> bytes:
        data = json.loads(roster().model_dump_json())
        data.update(changes)
        return json.dumps(data).encode()

    broken = peer(0).model_copy(update={"layout_hash": "0" * 32})
    own_role = card(0, pod_uid="peer-1")
    table = [
        (b"{", "Invalid JSON"),
        (b"", "Invalid JSON"),
        (body(key={"term": -1, "counter": 0}), "key.term"),
        (body(peers={"0": [{"agent_name": "x"}]}), "peers.0.0.cluster_uid"),
        (body(peers={"zero": []}), "peers.zero"),
        (roster(peers={0: (broken,)}).model_dump_json().encode(), "layout hash"),
        (roster(peers={1: (peer(0, cluster_uid="x"),)}).model_dump_json().encode(), "another PDCluster"),
        (roster(peers={1: (own_role,)}).model_dump_json().encode(), "own role"),
    ]
    async with running(tmp_path) as sidecar, http(sidecar) as c:
        for content, text in table:
            answer = await c.put("/v1/roster", content=content)
            assert answer.status_code == 400 and text in answer.json()["message"], (content, answer.text)
        for content in (b"[]", b"{", b'{"pod_uids": "x"}', b'{"pod_uids": [1]}'):
            assert (await c.post("/v1/probe", content=content)).status_code == 400
        assert (await c.get("/v1/roster")).status_code == 405
        assert (await c.get("/docs")).status_code == 404


async def test_bodies_are_bounded_in_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless() -> object:
        while True:
            yield b"x" * 4096

    async def slow() -> object:
        yield b"{"
        await asyncio.sleep(3)
        yield b"}"

    async with running(tmp_path, max_roster_bytes=10_000) as sidecar, http(sidecar) as c:
        assert (await c.put("/v1/roster", content=b" " * 10_001)).status_code == 413
        monkeypatch.setattr(serve, "DISCARD", 60)  # long enough for the client to end its body and see the answer
        monkeypatch.setattr(api, "BODY_DEADLINE", 0.5)  # for the slow one alone: any body may be late
        answer = await c.put("/v1/roster", content=slow())
        assert answer.status_code == 408
        monkeypatch.setattr(api, "BODY_DEADLINE", 60.0)
        monkeypatch.setattr(serve, "DISCARD", 0.2)
        with contextlib.suppress(httpx.TransportError):  # the server ends what goes on sending
            assert (await c.put("/v1/roster", content=endless())).status_code == 413
        assert (await put(c, roster(peers={}))).status_code == 412  # still serves


async def test_a_client_that_says_nothing_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "FIRST_REQUEST", 0.2)
    async with running(tmp_path) as sidecar:
        for said in (b"", b"GET /healthz HTT"):
            reader, writer = await asyncio.open_connection("127.0.0.1", sidecar.health.port)
            writer.write(said)
            async with asyncio.timeout(20):
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            writer.close()
