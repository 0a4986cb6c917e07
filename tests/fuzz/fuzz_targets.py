"""Everything that reads bytes which another process wrote, as functions that may only take or refuse them.

`run(data)` returns a short word for what happened (a new word keeps its input in the corpus); any exception is a
finding. `corpus` are valid inputs, made by the package's own models, so that they follow the contract.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from sidecar_kit import CLUSTER, POD, FakeEndpoint, card, peer, roster, verdict

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import PodCards, RankCard, StagingArena
from pdtransfer.contract.geometry import GeometryError
from pdtransfer.contract.hf_config import read_geometry
from pdtransfer.contract.link import Drain, Heartbeat, Hello, Peers, Probe, Refuse, Verdicts, rank_messages
from pdtransfer.contract.metrics import FAMILIES
from pdtransfer.contract.roster import Roster, RosterRefusal
from pdtransfer.contract.verdict import PodVerdicts
from pdtransfer.errors import TransferError
from pdtransfer.peers import coverage_gap, first_verdict, refusal, required_askers, roster_change, same_peer
from pdtransfer.session import frames
from pdtransfer.session.channel import Channel
from pdtransfer.session.metrics import Metrics
from pdtransfer.session.probe import choose_samples
from pdtransfer.sidecar import api, metrics, model, rank_link, rosters, views
from pdtransfer.sidecar.hub import Hub


@dataclass(frozen=True)
class Target:
    """`corpus` are valid inputs; `run` takes any bytes."""

    corpus: tuple[bytes, ...]
    run: Callable[[bytes], str]


def words(error: ValidationError) -> str:
    """Which checks refused, and roughly where."""
    found = sorted({f"{e['type']}@{'.'.join(str(p)[:12] for p in e['loc'][:2])}" for e in error.errors()[:4]})
    return "refused " + " ".join(found)


def text(value: BaseModel) -> bytes:
    return value.model_dump_json().encode()


IDS: dict[str, Any] = {"room": 7, "attempt": 1, "source": "prefill-1", "destination": "decode-1"}
FRAMES: tuple[BaseModel, ...] = (
    frames.Hello(
        cluster_uid="c", pod_uid="p", incarnation="i", rank=0, agent_name="a", layout_hash="h",
        to_pod_uid="q", to_incarnation="j", to_rank=1,
    ),
    frames.Welcome(pod_uid="p", incarnation="i", rank=0, agent_name="a"),
    frames.Refused(reason="PeerReplaced", message="m", drained=True),
    frames.Request(
        **IDS, serial=3, pages=(4, 5, 6), first_page=0, tokens=11, required=1, memory=MemoryKind.DRAM,
        pools=(frames.PoolPages(pool="swa", pages=(1, 2)),),
    ),
    frames.SlotsWanted(**IDS, arena=MemoryKind.DRAM, total=3),
    frames.SlotGrant(**IDS, arena=MemoryKind.DRAM, slot=1, ticket=9),
    frames.SlotFilled(**IDS, ticket=9, lane=0, first_region=0, regions=2, first_page=0, pages=1),
    frames.Started(**IDS),
    frames.Done(**IDS, nbytes=4096, metadata="aGk="),
    frames.Failed(**IDS, reason="Aborted", message="m", nbytes=1, settled=True),
    frames.Abort(**IDS, reason="r"),
    frames.AbortAck(**IDS),
    frames.Rotated(generation=1, oldest=0, agent_name="a.1", metadata="aGk=", metadata_hash="h"),
    frames.Moved(generation=1),
    frames.Ping(),
    frames.Pong(),
    frames.ProbeOpen(seq=1, samples=(frames.Sample(region=0, page=0, nbytes=64),)),
    frames.ProbeGrant(seq=1, address=4096, nbytes=64, digests=("d",)),
    frames.ProbeHash(seq=1),
    frames.ProbeDigests(seq=1, digests=("d",)),
    frames.ProbeCheck(seq=1),
    frames.ProbeChecked(seq=1, digest="d"),
    frames.ProbeClose(seq=1, settled=False),
)  # fmt: skip


# --- rank to rank ---------------------------------------------------------------------------------


def frame(data: bytes) -> str:
    try:
        got = frames.decode(data)
    except frames.FrameError:
        return "refused"
    hash(got)  # askers keep hashes of requests
    frames.encode(got)  # what was taken can be written again
    return type(got).__name__


def channel(data: bytes) -> str:
    """A stream of frames as the control channel reads it, with the two bounds it is read under."""
    return _LOOP.run_until_complete(_receive(data))


class _Quiet(asyncio.Transport):
    """A connection without a socket."""

    def resume_reading(self) -> None: ...
    def pause_reading(self) -> None: ...
    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None: ...


async def _receive(data: bytes) -> str:
    """The first frame under the bound of strangers, the rest as a peer's; in pieces, as sockets bring them."""
    end = Channel()
    end.connection_made(_Quiet())
    step = max(1, len(data) // 3)
    for start in range(0, len(data), step):
        end.data_received(data[start : start + step])
    end.connection_lost(None)
    seen: list[str] = []
    try:
        first = await end.receive(frames.MAX_HELLO)
        if first is not None:
            seen.append(type(first).__name__)
            await end.serve(lambda frame: seen.append(type(frame).__name__))
    except frames.FrameError as error:
        return f"{len(seen)} refused {'bound' if 'over the bound' in str(error) else ''}"
    return f"{len(seen)} end"


def stream(*several: BaseModel) -> bytes:
    return b"".join(frames.encode(f) for f in several)


_LOOP = asyncio.new_event_loop()


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


# --- sidecar --------------------------------------------------------------------------------------


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
    return _LOOP.run_until_complete(_ask(data))


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


# --- model config ---------------------------------------------------------------------------------

CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
     "num_key_value_heads": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 8192},
    {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
     "num_attention_heads": 128, "index_head_dim": 128, "dtype": "bfloat16"},
    {"text_config": {"model_type": "gemma2", "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64,
     "sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"] * 2}, "dtype": "bfloat16"},
    {"model_type": "nemotron_h", "num_hidden_layers": 6, "hybrid_override_pattern": "M*-EM*", "head_dim": 128,
     "num_attention_heads": 8, "num_key_value_heads": 2},
    {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64, "full_attention_interval": 4,
     "linear_attn_config": {"kda_layers": [1, 3]}, "num_kv_shared_layers": 1, "v_head_dim": 32,
     "swa_num_key_value_heads": 2, "hybrid_layer_pattern": [1, 0, 0, 1]},
)  # fmt: skip


def hf_config(data: bytes) -> str:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return "no JSON"
    try:
        got = read_geometry(config)
        for tp in (1, 2, 8):
            got.heads_per_rank(tp)
            got.page_bytes(16, tp, "bfloat16")
    except GeometryError as error:
        return "refused " + str(error)[:30]
    return f"{got.attention} {len(got.sliding_window_layers) > 0} {len(got.linear_layers) > 0}"


# --- a live endpoint ------------------------------------------------------------------------------


class LivePeer:
    """Frames of a rostered peer into endpoints that run (over the fake agent), both roles. Made at first use."""

    def __init__(self) -> None:
        self._world: Any = None
        self._count = 0

    def start(self) -> None:
        """Two wired ranks; takes seconds on a busy machine."""
        from kv_world import World

        world = World()
        self._pair = [world.rank(role) for role in (Role.PREFILL, Role.DECODE)]
        for mine, other in (self._pair, self._pair[::-1]):
            mine.endpoint.apply_peers([other.endpoint.card])
        assert all(rank.endpoint.wait_wired(120) for rank in self._pair), "the two ranks are not wired"
        self._world = world

    def __call__(self, data: bytes) -> str:
        if self._world is None:
            self.start()
        try:
            got = frames.decode(data)
        except frames.FrameError:
            return "refused"
        if isinstance(got, frames.Hello | frames.Welcome | frames.Refused | frames.Ping | frames.Pong):
            return "not for a peer"
        self._count += 1
        for rank in self._pair:
            self._hand(rank.endpoint, got)
        if self._count % 200 == 0:
            self._still_moves()
        return type(got).__name__

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    @staticmethod
    def _hand(endpoint: Any, got: frames.Frame) -> None:
        done, raised = threading.Event(), []

        def act() -> None:
            try:
                for one in list(endpoint._wiring.peers.values()):
                    endpoint._wiring.on_frame(one, got)
            except frames.FrameError:
                pass  # ends the connection, as a frame that does not decode
            except Exception as error:
                raised.append(error)
            done.set()

        endpoint._core.call(act)
        assert done.wait(10), "the endpoint's thread does not answer"
        if raised:
            raise raised[0]
        assert endpoint.failed is None, endpoint.failed

    def _still_moves(self) -> None:
        from kv_world import ask, give

        prefill, decode = self._pair
        for turn in range(3):  # on a busy machine one may run into its own short deadline
            room = 1_000_000 + 3 * self._count + turn  # beyond what the corpus names
            receiver = ask(decode, room, [4, 5])
            sender = give(prefill, room, [1, 2])
            if receiver.wait(8) == "Success":
                assert decode.pool.holds(room, [4, 5])
                return
        raise AssertionError(f"nothing moves any more: {receiver.error}, {sender.error}")


def _live() -> Target:
    # Not those by which a peer takes a new agent: believed, it would truly be gone.
    sent = [f for f in FRAMES[3:] if not isinstance(f, frames.Rotated | frames.Moved)]
    own = [f.model_copy(update={"room": 3}) if hasattr(f, "room") else f for f in sent]
    return Target(tuple(text(f) for f in (*sent, *own)), LivePeer())


def targets() -> dict[str, Target]:
    """By name."""
    body = text(roster((2, 1)))
    hello = Hello(card=full_card(), expected_ranks=2)
    said = Verdicts(verdicts=(verdict(0, peer(0)),))
    lines = b"\n".join(text(m) for m in (hello, Heartbeat(inflight=2), said))
    told = (Peers(term=1, counter=1, roster_hash="h", peers=(peer(0),)), Drain(), Probe(pod_uids=("x",)))
    shown = PodCards(cluster_uid=CLUSTER, pod_uid=POD, role=Role.PREFILL, expected_ranks=2, cards=(card(0), card(1)))
    judged = PodVerdicts(cluster_uid=CLUSTER, pod_uid=POD, role=Role.PREFILL, verdicts=said.verdicts, inflight=3)
    refused = RosterRefusal(reason="LowerKey", message="m", term=1)
    calls = (
        call("PUT", "/v1/roster", body, **{"content-type": "application/json"}),
        call("GET", "/v1/cards", **{"if-none-match": '"x", W/"y"'}),
        call("GET", "/v1/verdicts"),
        call("POST", "/v1/probe", b'{"pod_uids": ["peer-1"]}'),
        call("POST", "/v1/drain"),
    )
    return {
        "frame": Target(tuple(text(f) for f in FRAMES), frame),
        "channel": Target((stream(*FRAMES), stream(FRAMES[0], *FRAMES[3:9]), stream(FRAMES[12])), channel),
        "card": Target((text(full_card()), text(card(1, layers=3)), text(MINE)), rank_card),
        "roster": Target((body, text(roster((1, 1), {0: (full_card(),)})), text(roster((0, 0), {}))), roster_body),
        "rank-lines": Target((lines, text(hello), text(Refuse(reason="r", message="m"))), rank_lines),
        "rank-metrics": Target((measured(), text(Heartbeat())), rank_metrics),
        "link-lines": Target((b"\n".join(text(m) for m in told), text(Refuse(reason="r", message="m"))), link_lines),
        "control-api": Target(calls, control_api),
        "pod-answers": Target((text(shown), text(judged), text(refused)), pod_answers),
        "hf-config": Target(tuple(json.dumps(c).encode() for c in CONFIGS), hf_config),
        "live-peer": _live(),
    }
