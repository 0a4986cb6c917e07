"""The sidecar as a process: its flags, what it imports, what it weighs, how it ends."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sidecar_kit import CLUSTER, POD, FakeEndpoint, card, roster

from pdtransfer.contract.base import Role
from pdtransfer.sidecar import config
from pdtransfer.sidecar.model import Identity, PodState
from pdtransfer.sidecar.rank_link import RankLink
from pdtransfer.sidecar.rosters import parse
from pdtransfer.sidecar.state import restored
from pdtransfer.sidecar.store import StateFile

ENV = {"POD_UID": POD, "PDCLUSTER_UID": CLUSTER, "PDCLUSTER_ROLE": "prefill"}
HEAVY = ("torch", "nixl", "numpy", "httpx", "cryptography", "kubernetes", "kopf", "transformers")


def test_flags_win_over_the_environment_and_the_rest_has_defaults() -> None:
    env = ENV | {"POD_NAME": "p-0", "POD_NAMESPACE": "ns", "POD_IP": "fd00::1", "PDCLUSTER_REVISION": "abc"}
    got = config.parse(["--tls-dir", "/tls", "--role", "decode"], env)
    assert got == config.Settings(
        cluster_uid=CLUSTER,
        pod_uid=POD,
        role=Role.DECODE,
        pod_name="p-0",
        namespace="ns",
        pod_ip="fd00::1",
        revision="abc",
        socket=Path("/run/pdtransfer/sidecar.sock"),
        state_file=Path("/run/pdtransfer/sidecar.state.json"),
        host="::",
        health_host="::",
        control_port=9440,
        health_port=9441,
        tls_dir=Path("/tls"),
        client_identity="operator.pdcluster.internal",
        wiring=True,
    )
    insecure = config.parse(["--insecure", "--host", "0.0.0.0", "--wiring", "off"], ENV)
    assert (insecure.host, insecure.tls_dir, insecure.wiring) == ("127.0.0.1", None, False)


@pytest.mark.parametrize(
    ("argv", "env", "text"),
    [
        (["--insecure"], {}, "--cluster-uid or PDCLUSTER_UID is required"),
        ([], ENV, "--tls-dir"),
        (["--insecure", "--tls-dir", "/x"], ENV, "not both"),
        (["--insecure", "--role", "router"], ENV, "must be prefill or decode"),
        (["--insecure"], ENV | {"PDTRANSFER_WIRING": "maybe"}, "must be on or off"),
        (["--insecure", "--socket-mode", "rw"], ENV, "octal"),
    ],
)
def test_settings_that_do_not_fit_say_so(
    argv: list[str], env: dict[str, str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        config.parse(argv, env)
    assert e.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize("module", ["pdtransfer.sidecar.main", "pdtransfer.sidecar.rank_link"])
def test_nothing_heavy_is_imported(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


class Process:
    """A real `pdtransfer-sidecar` on free loopback ports."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.log = folder / "log"
        argv = [sys.executable, "-m", "pdtransfer.sidecar.main", "--insecure", "--health-host", "127.0.0.1"]
        argv += ["--control-port", "0", "--health-port", "0", "--socket", str(folder / "s.sock"), *flags]
        with self.log.open("wb") as out:
            self.child = subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ | ENV)

    def until(self, what: Callable[[], object], timeout: float = 60.0) -> object:
        end = time.monotonic() + timeout
        while not (value := what()):
            assert time.monotonic() < end and self.child.poll() is None, self.log.read_text()
            time.sleep(0.02)
        return value

    def get(self, path: str) -> tuple[int, str]:
        match = self.until(lambda: re.search(r"health_port=(\d+)", self.log.read_text()))
        c = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=20)  # type: ignore[index]
        try:
            c.request("GET", path)
            answer = c.getresponse()
            return answer.status, answer.read().decode()
        finally:
            c.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(*flags: str) -> Process:
        made.append(Process(tmp_path, *flags))
        return made[-1]

    yield start
    for p in made:
        p.child.kill()
        p.child.wait(10)


def test_it_serves_and_ends_cleanly_on_sigterm_within_its_bound(start: Callable[..., Process], tmp_path: Path) -> None:
    p = start("--linger", "60")
    assert p.get("/healthz") == (200, "ok\n")
    assert p.get("/readyz") == (503, "no rank registered yet\nno roster yet\n")
    link = RankLink(tmp_path / "s.sock", FakeEndpoint(card(0, tp_size=1)), expected_ranks=1).start()
    try:
        p.until(lambda: p.get("/readyz")[1] == "no roster yet\n")
        assert "pdtransfer_ranks_registered 1.0" in p.get("/metrics")[1]
        rss = int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{p.child.pid}/status").read_text())[1])  # type: ignore[index]
        assert rss < 64 << 10, f"{rss} KiB"
        p.child.send_signal(signal.SIGTERM)
        p.until(lambda: "stopping ranks=1" in p.log.read_text())
        time.sleep(0.5)
        # A rank is still there: it waits for it, and goes on serving probes.
        assert p.child.poll() is None and p.get("/healthz")[0] == 200
    finally:
        link.stop()
    assert p.child.wait(20) == 0  # as soon as the rank has left
    assert not (tmp_path / "s.sock").exists()
    text = p.log.read_text()
    assert "INSECURE" in text and text.rstrip().endswith("stopped") and "Traceback" not in text


def test_a_rank_that_never_leaves_does_not_hold_it_back(start: Callable[..., Process], tmp_path: Path) -> None:
    p = start("--linger", "0.3")
    link = RankLink(tmp_path / "s.sock", FakeEndpoint(card(0, tp_size=1)), expected_ranks=1).start()
    try:
        p.until(lambda: p.get("/readyz")[1] == "no roster yet\n")
        p.child.send_signal(signal.SIGTERM)
        assert p.child.wait(20) == 0
    finally:
        link.stop()


def test_a_taken_port_is_an_error_with_status_1(start: Callable[..., Process]) -> None:
    p = start()
    match = p.until(lambda: re.search(r"control API port=(\d+)", p.log.read_text()))
    argv = [sys.executable, "-m", "pdtransfer.sidecar.main", "--insecure", "--control-port", match[1]]  # type: ignore[index]
    argv += ["--health-port", "0", "--socket", str(p.log.with_name("t.sock"))]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=os.environ | ENV, check=False)
    assert out.returncode == 1 and "can not start" in out.stderr and "Traceback" not in out.stderr


def test_killed_and_started_again_it_comes_back_with_its_ranks(start: Callable[..., Process], tmp_path: Path) -> None:
    first = start()
    endpoint = FakeEndpoint(card(0, tp_size=1))
    link = RankLink(tmp_path / "s.sock", endpoint, expected_ranks=1).start()
    try:
        first.until(lambda: first.get("/readyz")[1] == "no roster yet\n")
        first.child.kill()
        first.child.wait(20)
        second = start()
        second.until(lambda: second.get("/readyz")[1] == "no roster yet\n")
        assert link.failed is None
    finally:
        link.stop()


def test_the_kept_state_is_private_and_comes_back_for_the_same_pod_only(tmp_path: Path) -> None:
    me = Identity(cluster_uid=CLUSTER, pod_uid=POD, role=Role.PREFILL)
    body = roster((2, 3)).model_dump_json().encode()
    file = StateFile(tmp_path / "kept.json")
    file.save_roster(body)
    file.save_drain(me)
    assert file.load(me) == restored(me, parse(body), True)
    assert (tmp_path / "kept.json").stat().st_mode & 0o777 == 0o600
    other = replace(me, pod_uid="other")
    assert file.load(other) == PodState(identity=other)
    nowhere = StateFile(tmp_path / "missing" / "x.json")
    nowhere.save_roster(body)  # logged, not raised
    assert nowhere.load(me) == PodState(identity=me)
