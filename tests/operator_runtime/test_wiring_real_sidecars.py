"""The operator with the real decide() and real sidecars over mutual TLS: from a spec to wired pods.

The API server is the fake; a small kubelet gives each pod an address and runs its sidecar with the
certificate out of the Secret; ranks are scripted ends of the unix socket that confirm their peers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_world import pdcluster

from free_ports import free_port
from pdoperator.api import names
from pdoperator.domain.actions import Decision, Memory
from pdoperator.domain.decide import decide
from pdoperator.domain.observed import Observed
from pdoperator.domain.settings import DecideSettings
from pdoperator.kube.fake import FakeKube
from pdoperator.pods.sidecar import SidecarClient
from pdoperator.runtime.credentials import Credentials
from pdoperator.runtime.lease import LeaseTimes
from pdoperator.runtime.operator import Operator
from pdoperator.runtime.supervisor import Pace
from pdoperator.settings import OperatorSettings
from pdtransfer.contract.base import EngineType, MemoryKind, Role
from pdtransfer.contract.card import EngineFacts, RankCard
from pdtransfer.contract.fingerprint import ModelIdentity
from pdtransfer.contract.layout import HeadSlice, RankLayout, Region, RegionKind
from pdtransfer.contract.link import Failed, Heartbeat, Hello, Verdicts
from pdtransfer.contract.verdict import Verdict, VerdictState
from pdtransfer.sidecar import config
from pdtransfer.sidecar.main import Sidecar


class Rank:
    """One scripted rank: Hello, then Wired for every peer it is told of."""

    def __init__(self, path: Path, cluster_uid: str, pod_uid: str, role: Role, incarnation: str) -> None:
        regions = tuple(
            Region(layer=0, kind=k, item_bytes=4096, items=64, memory=MemoryKind.DRAM)
            for k in (RegionKind.KEY, RegionKind.VALUE)
        )
        layout = RankLayout(
            page_tokens=16, kv_dtype="float32", heads=HeadSlice(first=0, count=2, total=2), regions=regions
        )
        self.card = RankCard(
            cluster_uid=cluster_uid,
            pod_uid=pod_uid,
            role=role,
            incarnation=incarnation,
            model=ModelIdentity(name="tiny", dtype="float32", layers=1),
            layout=layout,
            engine=EngineFacts(type=EngineType.REFERENCE, version="1"),
            agent_name=f"{pod_uid}/{incarnation}/0",
            nixl_metadata="bm90IHJlYWw=",
            control="127.0.0.1:1",
            bootstrap="127.0.0.1:8998" if role is Role.PREFILL else "",
        ).sealed()
        self.peers: tuple[RankCard, ...] = ()
        self.task = asyncio.create_task(self._run(path))

    async def _run(self, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=1 << 24)

        def say(message: Any) -> None:
            writer.write(message.model_dump_json().encode() + b"\n")

        async def beat() -> None:
            while True:
                say(Heartbeat())
                await asyncio.sleep(0.3)

        say(Hello(card=self.card, expected_ranks=1))
        beats = asyncio.create_task(beat())
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if message["type"] == "peers":
                    self.peers = tuple(RankCard.model_validate(p) for p in message["peers"])
                    say(Verdicts(verdicts=tuple(self._wired(p) for p in self.peers)))
        finally:
            beats.cancel()
            writer.close()

    def fail(self, path: Path, why: str) -> None:
        """Its endpoint fails, its process lives: the card goes, and it says why."""
        self.task.cancel()

        async def tell() -> None:
            reader, writer = await asyncio.open_unix_connection(path)
            failed = Failed(rank=0, incarnation=self.card.incarnation, message=why)
            writer.write(failed.model_dump_json().encode() + b"\n")
            with contextlib.suppress(OSError):
                await reader.readline()
            writer.close()

        self.task = asyncio.create_task(tell())

    def _wired(self, peer: RankCard) -> Verdict:
        return Verdict(
            rank=0, incarnation=self.card.incarnation, peer_pod_uid=peer.pod_uid,
            peer_incarnation=peer.incarnation, peer_rank=peer.rank, state=VerdictState.WIRED,
            bytes_moved=8192, seconds=0.001, checksum_ok=True, transport="tcp", evidence="scripted", at=time.time(),
        )  # fmt: skip


class Kubelet:
    """Runs what a pod would run."""

    def __init__(self, kube: FakeKube, folder: Path, port: int) -> None:
        self.kube, self.folder, self.port = kube, folder, port
        self.addresses = itertools.count(1)
        self.sidecars: dict[str, Sidecar] = {}
        self.ranks: dict[str, Rank] = {}
        self.paths: dict[str, Path] = {}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            for pod in self.kube.of("Pod"):
                if "deletionTimestamp" in pod["metadata"]:
                    self.kube.finish(pod["metadata"]["namespace"], pod["metadata"]["name"])
                elif pod["metadata"]["uid"] not in self.sidecars and self.kube.of("Secret", "user"):
                    await self._start(pod)
            await asyncio.sleep(0.05)

    async def _start(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        uid, role = meta["uid"], Role(meta["labels"][names.LABEL_ROLE])
        cluster_uid = meta["labels"][names.LABEL_CLUSTER_UID]
        here = self.folder / uid[-4:]
        here.mkdir()
        secret = next(s for s in self.kube.of("Secret", "user") if s["metadata"]["name"].endswith("-tls"))
        for name, data in secret["data"].items():
            (here / name).write_bytes(base64.b64decode(data))
        ip = f"127.0.77.{next(self.addresses)}"
        sidecar = Sidecar(
            config.Settings(
                cluster_uid=cluster_uid, pod_uid=uid, role=role, socket=here / "s", host=ip, health_host=ip,
                control_port=self.port, health_port=0, tls_dir=here,
            )
        )  # fmt: skip
        await sidecar.start()
        self.sidecars[uid], self.paths[uid] = sidecar, here / "s"
        self.ranks[uid] = Rank(here / "s", cluster_uid, uid, role, "i1")
        running = [{"name": c, "state": {"running": {}}, "ready": True} for c in ("engine", names.CONTAINER_SIDECAR)]
        conditions = [{"type": t, "status": "True"} for t in ("PodScheduled", "ContainersReady")]
        status = {"phase": "Running", "podIP": ip, "containerStatuses": running, "conditions": conditions}
        self.kube.put({**pod, "spec": {**pod["spec"], "nodeName": "n"}, "status": status})

    def restart_engine(self, uid: str, incarnation: str) -> None:
        """The rank ends and comes back in place, as a new incarnation."""
        old = self.ranks[uid]
        old.task.cancel()
        self.ranks[uid] = Rank(self.paths[uid], old.card.cluster_uid, uid, old.card.role, incarnation)

    async def stop(self) -> None:
        self.task.cancel()
        tasks = [r.task for r in self.ranks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait({self.task, *tasks})
        for sidecar in self.sidecars.values():
            await sidecar.stop()


TIMES = LeaseTimes(duration=15.0, renew=0.5, retry=0.1, margin=1.0)


def client(port: int) -> Callable[[Credentials], SidecarClient]:
    """What asks the sidecars. With time: one that is not reached in it is told as such, and writes to status."""
    return lambda keys: SidecarClient(keys.client_context, port=port, jitter=0.0, deadline=20.0)


async def until(what: Callable[[], Any], timeout: float = 45.0) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.05)


def gates(kube: FakeKube) -> list[str]:
    found = []
    for pod in kube.of("Pod"):
        conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", [])}
        found.append(conditions.get(names.GATE_KV_WIRED, ""))
    return found


def replaced(kube: FakeKube) -> list[str]:
    """Messages of the PeerReplaced events that exist."""
    return sorted(e["message"] for e in kube.of("Event") if e["reason"] == "PeerReplaced")


@pytest.mark.timeout(170)
async def test_pods_are_wired_gated_and_wired_again_after_an_engine_and_an_operator_restart(tmp_path: Path) -> None:
    kube, port = FakeKube(), free_port()
    spec = pdcluster(replicas=1)
    spec["spec"]["decode"] = {"replicas": 2}
    spec["spec"]["router"] = {"type": "None"}
    kube.put(spec)
    settings = OperatorSettings(operator_namespace="ops", pod_name="op")
    looks: list[int] = []

    def looking(seen: Observed, memory: Memory, held: DecideSettings) -> Decision:
        looks.append(seen.term)
        return decide(seen, memory, held)

    def make() -> Operator:
        return Operator(kube, settings, looking, pace=Pace(resync=1.0), times=TIMES, sidecars=client(port))

    one = make()
    kube.on_change.append(lambda event, obj: one.pod_event(event, obj) if obj["kind"] == "Pod" else None)
    running = asyncio.create_task(one.run())
    kubelet = Kubelet(kube, tmp_path, port)
    try:
        await until(lambda: gates(kube) == ["True"] * 3)
        prefill = next(r for r in kubelet.ranks.values() if r.card.role is Role.PREFILL)
        assert len(prefill.peers) == 2

        # An operator restart: a higher term, and nothing is unwired or written anew to the gates.
        running.cancel()
        await asyncio.wait({running})
        await one.stop()
        stamps = [w.resource for w in kube.writes].count("pods/status")
        two = make()
        running = asyncio.create_task(two.run())
        await until(lambda: looks.count(2) >= 4)
        assert gates(kube) == ["True"] * 3
        assert [w.resource for w in kube.writes].count("pods/status") == stamps

        # An engine restarts in place: its peers are told of the new incarnation, and of it only.
        kubelet.restart_engine(prefill.card.pod_uid, "i2")
        decodes = [r for r in kubelet.ranks.values() if r.card.role is Role.DECODE]
        await until(lambda: all([p.incarnation for p in d.peers] == ["i2"] for d in decodes))

        def wired_again() -> bool:
            status = kube.of("PDCluster")[0]["status"]  # written after the events, so a new one is waited for
            conditions = {c["type"]: c["status"] for c in status["conditions"]}
            new = status["incarnations"][prefill.card.pod_uid] == "i2"
            return new and conditions["PeersWired"] == "True" and gates(kube) == ["True"] * 3

        await until(wired_again)
        await until(lambda: len(replaced(kube)) == 1)
        running.cancel()
        await asyncio.wait({running})
        await two.stop()

        # It restarts while no operator runs: the next one tells that too, and what was told is not told again.
        kubelet.restart_engine(prefill.card.pod_uid, "i3")
        three = make()
        running = asyncio.create_task(three.run())
        await until(lambda: len(replaced(kube)) == 2)
        await until(lambda: kube.of("PDCluster")[0]["status"]["incarnations"][prefill.card.pod_uid] == "i3")
        name = next(p["metadata"]["name"] for p in kube.of("Pod") if p["metadata"]["uid"] == prefill.card.pod_uid)
        assert replaced(kube) == [
            f"{name} started again (incarnation {old} is now {new}); its peers are wired to the new one"
            for old, new in (("i1", "i2"), ("i2", "i3"))
        ]
        running.cancel()
        await asyncio.wait({running})
        await three.stop()
    finally:
        running.cancel()
        await kubelet.stop()
        with contextlib.suppress(Exception):
            await one.stop()


@pytest.mark.timeout(170)
async def test_a_rank_that_says_it_failed_costs_its_pod_and_the_next_one_is_wired(tmp_path: Path) -> None:
    kube, port = FakeKube(), free_port()
    spec = pdcluster(replicas=1)
    spec["spec"]["router"] = {"type": "None"}
    kube.put(spec)
    operator = Operator(
        kube,
        OperatorSettings(operator_namespace="ops", pod_name="op"),
        lambda seen, memory, held: decide(
            seen, memory, replace(held, failed_limit_seconds=1.0, backoff_base_seconds=1)
        ),
        pace=Pace(resync=1.0),
        times=TIMES,
        sidecars=client(port),
    )
    kube.on_change.append(lambda event, obj: operator.pod_event(event, obj) if obj["kind"] == "Pod" else None)
    running = asyncio.create_task(operator.run())
    kubelet = Kubelet(kube, tmp_path, port)
    try:
        await until(lambda: gates(kube) == ["True"] * 2)
        lame = next(r for r in kubelet.ranks.values() if r.card.role is Role.PREFILL)
        lame.fail(kubelet.paths[lame.card.pod_uid], "thread pdcluster-watch ended: KeyError: 'lost'")
        await until(lambda: lame.card.pod_uid not in {p["metadata"]["uid"] for p in kube.of("Pod")})

        def told() -> set[tuple[str, bool]]:
            events = kube.of("Event")
            return {(e["reason"], "KeyError: 'lost'" in e.get("note", e.get("message", ""))) for e in events}

        await until(lambda: {("RankFailed", True), ("Recycled", True)} <= told())  # written after the pod's end
        await until(lambda: gates(kube) == ["True"] * 2)
        assert len(kube.of("Pod")) == 2
    finally:
        running.cancel()
        await asyncio.wait({running})
        await kubelet.stop()
        await operator.stop()
