"""Targets at the sidecar: cards, rosters, what ranks and the operator send it, and what it answers."""

from __future__ import annotations

import json
from typing import Any

from fuzz_target import LOOP, text, words
from pydantic import TypeAdapter, ValidationError
from sidecar_kit import CLUSTER, POD, FakeEndpoint, card, peer

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import PodCards, RankCard, StagingArena
from pdtransfer.contract.link import Heartbeat, Hello, rank_messages
from pdtransfer.contract.metrics import FAMILIES
from pdtransfer.contract.roster import Roster, RosterRefusal
from pdtransfer.contract.verdict import PodVerdicts
from pdtransfer.errors import TransferError
from pdtransfer.peers import coverage_gap, first_verdict, refusal, required_askers, roster_change, same_peer
from pdtransfer.session.metrics import Metrics
from pdtransfer.session.probe import choose_samples
from pdtransfer.sidecar import api, metrics, model, rank_link, rosters, views
from pdtransfer.sidecar.hub import Hub


def full_card() -> RankCard:
    arena = StagingArena(memory=MemoryKind.DRAM, address=1 << 20, slot_bytes=1 << 16, slots=4)
    update = {
        "nixl_metadata": "bm90IHJlYWw=",
        "control": "127.0.0.1:9",
        "bootstrap": "127.0.0.1:8",
        "staging": (arena,),
    }
    return card(0).model_copy(update=update).sealed()


MINE = peer(0)
"""The decode rank that reads other ranks' cards."""


def rank_card(data: bytes) -> str:
    """A card as a rank treats it: parsed, checked, mapped."""
    try:
        got = RankCard.model_validate_json(data)
    except ValidationError as error:
        return words(error)
    first_verdict(MINE, got)
    same_peer(got, full_card())
    roster_change({(got.pod_uid, got.rank): got}, [full_card()])
    for shown in (got, got.sealed()):  # the second passes the seal and meets the other checks
        why = refusal(MINE, shown)
        if why is None:
            coverage_gap([shown], MINE)
            required_askers(shown, MINE)
            choose_samples(shown)
            if (odd := _plan(shown)) is not None:
                return odd
    return f"card {why[0] if why else 'fits'}"


def _plan(prefill: RankCard) -> str | None:
    from pdtransfer.plan import pair_plan, plan

    try:
        plan(prefill.layout, MINE.layout, (0,), (0,))
        made = pair_plan(prefill.layout, MINE.layout)
        assert made.nbytes(1) > 0
    except TransferError as error:
        return f"card no plan {error.reason}"
    return None


def new_hub() -> Hub:
    return Hub(model.PodState(identity=model.Identity(cluster_uid=CLUSTER, pod_uid=POD, role=Role.PREFILL)))


def roster_body(data: bytes) -> str:
    try:
        held = rosters.parse(data)
    except rosters.BadRoster as error:
        return "refused " + str(error)[:40]
    assert Roster.model_validate_json(data).hash == held.hash, "operator and sidecar hash it differently"
    hub = registered()
    answer = hub.put_roster(held, data)
    return f"roster {answer.reason if answer is not None else 'taken'}"


def registered() -> Hub:
    hub = new_hub()
    for rank in range(2):
        hub.message(rank + 1, Hello(card=card(rank), expected_ranks=2))
    return hub


def rank_lines(data: bytes) -> str:
    """Lines of one rank beside another one that behaves, and everything that the sidecar shows of them."""
    hub = new_hub()
    hub.connect(lambda effects: [e.message.model_dump_json() for e in effects if isinstance(e, model.Send)] and None)
    hub.message(99, Hello(card=card(1), expected_ranks=2))
    seen = []
    for line in data.split(b"\n")[:50]:
        try:
            message = rank_messages.validate_json(line)
        except ValidationError as error:
            rosters.error_text(error)
            seen.append("bad")
            break
        hub.message(1, message)
        seen.append(message.type)
    now = hub.clock()
    views.pod_cards(hub.state, now).digest  # noqa: B018
    views.pod_verdicts(hub.state).model_dump_json()
    views.readiness(hub.state, now, True, "", "")
    metrics.render(hub, True)
    return f"{' '.join(seen[:4])} {len(hub.state.ranks)} {len(hub.state.refused)}"


HELLO = text(Hello(card=card(0), expected_ranks=2))


def rank_metrics(data: bytes) -> str:
    """What a rank measured, as its sidecar shows it."""
    return rank_lines(HELLO + b"\n" + data)


def measured() -> bytes:
    """A heartbeat with a sample of every family."""
    held = Metrics()
    for family in FAMILIES.values():
        labels = {name: values[0] if values else "x" for name, values in family.labels.items()}
        {"counter": held.count, "gauge": held.gauge, "histogram": held.observe}[family.kind](family.name, 1.5, **labels)
    return text(Heartbeat(inflight=2, metrics=held.snapshot()))


def link_lines(data: bytes) -> str:
    """Lines of a sidecar as a rank's link takes them."""
    endpoint = FakeEndpoint(card(0))
    link = rank_link.RankLink("/nowhere", endpoint, 1)
    try:
        session = rank_link._Session(link, None, None)  # type: ignore[arg-type]
        for line in data.split(b"\n")[:50]:
            session._handle(line)
    except rank_link._Ended as ended:
        return "ended " + str(ended)[:20]
    finally:
        link.stop()
    return f"{len(endpoint.applied)} {len(endpoint.probes)} {endpoint.drained}"


def control_api(data: bytes) -> str:
    """`METHOD path?query` in the first line, a JSON object of headers in the second, then the body."""
    return LOOP.run_until_complete(_ask(data))


async def _ask(data: bytes) -> str:
    import httpx

    first, _, rest = data.partition(b"\n")
    second, _, body = rest.partition(b"\n")
    method, _, path = first.decode("latin-1").partition(" ")
    try:
        headers = {str(k): str(v) for k, v in json.loads(second or b"{}").items()}
        app = api.ControlAPI(registered(), 1 << 20).app(None)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        client = httpx.AsyncClient(transport=transport, base_url="http://pod")
        request = client.build_request(method or "GET", "/" + path.lstrip("/"), headers=headers, content=body)
    except (ValueError, AttributeError, TypeError, RecursionError, httpx.InvalidURL):
        return "no request"  # HTTP itself could not carry it
    async with client:
        answer = await client.send(request)
    assert answer.status_code < 500, (answer.status_code, answer.text)
    if answer.status_code in (400, 408, 409, 412, 413):
        assert answer.json()["reason"], answer.text
    return f"{method[:6]} {answer.status_code}"


def call(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    return b"\n".join((f"{method} {path}".encode(), json.dumps(headers).encode(), body))


ANSWERS: TypeAdapter[Any] = TypeAdapter(PodCards | PodVerdicts | RosterRefusal)


# --- model config ---------------------------------------------------------------------------------


def pod_answers(data: bytes) -> str:
    """What the operator reads of a pod."""
    seen = []
    for kind in (PodCards, PodVerdicts, RosterRefusal):
        try:
            got = kind.model_validate_json(data)
        except ValidationError as error:
            seen.append(words(error)[:30])
            continue
        if isinstance(got, PodCards):
            got.digest, got.complete, [c.seal_broken for c in got.cards]
        got.model_dump_json()
        seen.append(kind.__name__)
    return " ".join(seen)
