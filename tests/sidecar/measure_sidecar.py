"""What a sidecar and the ranks' links cost: memory, idle CPU, time of a large roster. Not a test.

    python tests/sidecar/measure_sidecar.py [--ranks 8] [--peers 64] [--layers 80] [--seconds 20]

One sidecar process over mutual TLS, `ranks` links in this process (fake endpoints, nothing moves),
a roster of `ranks` x `peers` cards with `layers` K and V regions each; then `seconds` of idling with
an operator asking cards every 2 s and a kubelet probing every 5 s.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sidecar_kit import CLUSTER, POD, Authority, FakeEndpoint, card, peer, roster

from pdtransfer.sidecar.config import OPERATOR_IDENTITY
from pdtransfer.sidecar.rank_link import RankLink

TICK = os.sysconf("SC_CLK_TCK")


def cpu(path: str) -> float:
    """CPU seconds (user and system) of a /proc stat file."""
    fields = Path(path).read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def memory(pid: int) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    kib = {n: int(v) for n, v in re.findall(r"(VmRSS|VmHWM):\s+(\d+)", text)}
    return ", ".join(f"{n} {v / 1024:.1f} MiB" for n, v in kib.items())


def main() -> None:
    p = argparse.ArgumentParser()
    for name, value in (("ranks", 8), ("peers", 64), ("layers", 80), ("seconds", 20)):
        p.add_argument(f"--{name}", type=int, default=value)
    a = p.parse_args()
    folder = Path(tempfile.mkdtemp())
    ca = Authority()
    pod, operator = ca.issue(folder / "pod", "pod.pdcluster.internal"), ca.issue(folder / "op", OPERATOR_IDENTITY)
    log = folder / "log"
    argv = [sys.executable, "-m", "pdtransfer.sidecar.main", "--tls-dir", str(pod), "--host", "127.0.0.1"]
    argv += ["--health-host", "127.0.0.1", "--control-port", "0", "--health-port", "0"]
    argv += ["--socket", str(folder / "s.sock"), "--role", "prefill", "--pod-uid", POD, "--cluster-uid", CLUSTER]
    with log.open("wb") as out:
        child = subprocess.Popen(argv, stdout=out, stderr=out)
    while not (ports := re.findall(r"(?:API port|health_port)=(\d+)", log.read_text())) or len(ports) < 2:
        time.sleep(0.02)
    control, health = map(int, ports)
    context = ssl.create_default_context(cafile=str(operator / "ca.crt"))
    context.check_hostname = False
    context.load_cert_chain(operator / "tls.crt", operator / "tls.key")
    c = http.client.HTTPSConnection("127.0.0.1", control, timeout=60, context=context)

    def ask(method: str, path: str, body: bytes | None = None, **headers: str) -> http.client.HTTPResponse:
        c.request(method, path, body, headers)
        answer = c.getresponse()
        answer.data = answer.read()  # type: ignore[attr-defined]
        return answer

    def ready() -> None:
        h = http.client.HTTPConnection("127.0.0.1", health, timeout=5)
        h.request("GET", "/readyz")
        h.getresponse().read()
        h.close()

    print(f"empty: {memory(child.pid)}")
    ends = [FakeEndpoint(card(i, tp_size=a.ranks, layers=a.layers)) for i in range(a.ranks)]
    links = [RankLink(folder / "s.sock", e, a.ranks).start() for e in ends]
    time.sleep(1.5)
    answer = ask("GET", "/v1/cards")
    etag, size = answer.headers["etag"], len(answer.data)  # type: ignore[attr-defined]
    print(f"{a.ranks} ranks, cards answer {size / 1024:.0f} KiB: {memory(child.pid)}")
    peers = {
        r: [peer(r, f"peer-{i}", tp_size=a.ranks, layers=a.layers) for i in range(a.peers)] for r in range(a.ranks)
    }
    body = roster(peers=peers).model_dump_json().encode()
    began = time.monotonic()
    status = ask("PUT", "/v1/roster", body).status
    took = time.monotonic() - began
    while not all(e.applied for e in ends):
        time.sleep(0.01)
    applied = time.monotonic() - began
    print(
        f"roster of {a.ranks * a.peers} cards, {len(body) / 2**20:.1f} MiB: {status} in {took:.2f} s, "
        f"applied by every rank after {applied:.2f} s: {memory(child.pid)}"
    )
    etag = ask("GET", "/v1/cards").headers["etag"]
    threads = [
        t.native_id for t in threading.enumerate() if t.name == "pdtransfer-rank-link" and t.native_id is not None
    ]
    before, links_before = cpu(f"/proc/{child.pid}/stat"), [cpu(f"/proc/self/task/{t}/stat") for t in threads]
    end = time.monotonic() + a.seconds
    step = 0
    while time.monotonic() < end:
        if step % 4 == 0:
            assert ask("GET", "/v1/cards", **{"if-none-match": etag}).status == 304
        if step % 10 == 0:
            ready()
        step += 1
        time.sleep(0.5)
    used = cpu(f"/proc/{child.pid}/stat") - before
    each = [cpu(f"/proc/self/task/{t}/stat") - b for t, b in zip(threads, links_before, strict=True)]
    print(f"idle {a.seconds} s: sidecar {100 * used / a.seconds:.2f} % of a core; {memory(child.pid)}")
    print(f"idle {a.seconds} s: link {100 * sum(each) / len(each) / a.seconds:.3f} % of a core per rank (mean)")
    for link in links:
        link.stop()
    child.terminate()
    print(f"ended with status {child.wait(10)}")


if __name__ == "__main__":
    main()
