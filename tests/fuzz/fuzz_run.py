"""Runs every decoder on odd inputs for a while: `make fuzz SECONDS=600`, or python tests/fuzz/fuzz_run.py --help.

Each target runs in a process of its own, so that a crash, a hang in C code or memory without bound is a finding too.
A finding is printed with its input (base64) and kept in a folder; --replay FILE runs it again.
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "sidecar", HERE.parent / "transfer"):
    sys.path.insert(0, str(folder))

from fuzz_mutate import Mutator  # noqa: E402

INPUT_SECONDS = 2.0
WAIT_SECONDS = 30.0
"""Of processor time and of waiting, what one input may take; valid inputs take a few milliseconds."""
SILENCE = 60.0
"""Seconds without a new input until the child is killed (it hangs where no signal reaches)."""
GROWTH = 256 << 20
"""Bytes a target may grow by, after its first 500 inputs."""
MEMORY = 4 << 30
"""Bytes of address space that a child may take beyond what it has when it begins."""
KEEP = 300
"""Inputs the corpus may grow by."""


class TooSlow(Exception):
    """One input took longer than it may."""


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fuzz(run: Any, corpus: tuple[bytes, ...], seconds: float, seed: int, current: Path, most: int = 1 << 60) -> dict:
    """Runs until the time is up, `most` inputs ran, or 10 findings; returns counts and findings."""

    def alarm(number: int, _: object) -> None:
        limit = f"{INPUT_SECONDS} s of processor time" if number == signal.SIGPROF else f"{WAIT_SECONDS} s"
        raise TooSlow(f"over {limit}")

    signal.signal(signal.SIGALRM, alarm)
    signal.signal(signal.SIGPROF, alarm)
    mutator = Mutator(corpus, seed)
    seen: dict[str, int] = {}
    findings: list[dict[str, str]] = []
    slowest, count, base, kept = 0.0, 0, 0, 0
    end = time.monotonic() + seconds
    fd = os.open(current, os.O_CREAT | os.O_WRONLY)
    pending = list(corpus)
    while time.monotonic() < end and count < most and len(findings) < 10:
        data = pending.pop() if pending else mutator.next()
        os.pwrite(fd, len(data).to_bytes(8, "big") + data, 0)
        signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, INPUT_SECONDS)
        began = time.thread_time()
        try:
            word = run(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            told = "".join(traceback.format_exception(error)[-6:])
            findings.append({"error": f"{type(error).__name__}: {error}"[:300], "trace": told, "input": _b64(data)})
            word = f"FINDING {type(error).__name__}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.thread_time() - began)
        count += 1
        if word not in seen and kept < KEEP and len(data) < 1 << 18:
            mutator.corpus.append(data)
            kept += 1
        seen[word] = seen.get(word, 0) + 1
        if count == 500:
            base = rss()
    os.close(fd)
    grown = rss() - base if base else 0
    if grown > GROWTH:
        findings.append({"error": f"grew by {grown >> 20} MiB over {count} inputs", "trace": "", "input": ""})
    return {
        "inputs": count,
        "outcomes": len(seen),
        "common": dict(sorted(seen.items(), key=lambda kv: -kv[1])[:5]),
        "slowest_ms": round(slowest * 1e3, 1),
        "grown_mib": round(grown / (1 << 20), 1),
        "findings": findings,
    }


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def child(name: str, seconds: float, seed: int, current: Path) -> None:
    from fuzz_targets import targets

    faulthandler.enable()
    target = targets()[name]
    getattr(target.run, "start", bool)()  # what takes long, or maps much, is not an input's fault
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    print(json.dumps(fuzz(target.run, target.corpus, seconds, seed, current)), flush=True)
    os._exit(0)  # endpoints of a target may have threads; nothing of theirs is wanted


def one(name: str, seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Run one target in a child and say how it ended."""
    current, log = folder / f"{name}.input", folder / f"{name}.log"
    command = [sys.executable, __file__, "--child", name, "--seconds", str(seconds), "--seed", str(seed)]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--current", str(current)], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        began = time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            last = current.stat().st_mtime if current.exists() else time.time()
            if time.time() - last > SILENCE and time.monotonic() - began > SILENCE:
                process.kill()
                break
        out = process.communicate()[0]
    if process.returncode == 0:
        return dict(json.loads(out))
    data = current.read_bytes() if current.exists() else b""
    size = int.from_bytes(data[:8], "big") if data else 0
    how = "no new input for a minute" if process.returncode == -9 else f"the process ended with {process.returncode}"
    told = log.read_text(errors="replace")[-2000:]
    finding = {"error": how, "trace": told, "input": _b64(data[8 : 8 + size])}
    return {"inputs": -1, "outcomes": 0, "slowest_ms": 0.0, "grown_mib": 0.0, "findings": [finding]}


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seconds", type=float, default=60.0, help="of all targets together (default 60)")
    words.add_argument("--seed", type=int, default=int(time.time()))
    words.add_argument("--targets", default="", help="names, comma-separated (default: all)")
    words.add_argument("--replay", type=Path, help="a finding's file: run it once, with its traceback")
    words.add_argument("--child", help=argparse.SUPPRESS)
    words.add_argument("--current", type=Path, help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.child:
        child(asked.child, asked.seconds, asked.seed, asked.current)
    from fuzz_targets import targets

    every = targets()
    if asked.replay:
        print(every[asked.replay.name.split(".")[0]].run(asked.replay.read_bytes()))
        return 0
    names = asked.targets.split(",") if asked.targets else list(every)
    folder = Path(tempfile.mkdtemp(prefix="pdtransfer-fuzz-"))
    print(f"seed {asked.seed}, {asked.seconds / len(names):.0f} s a target, findings go to {folder}")
    print(f"{'target':12} {'inputs':>9} {'outcomes':>9} {'slowest ms':>11} {'grown MiB':>10} {'findings':>9}")
    bad = 0
    for name in names:
        got = one(name, asked.seconds / len(names), asked.seed, folder)
        row = (got["inputs"], got["outcomes"], got["slowest_ms"], got["grown_mib"], len(got["findings"]))
        print(f"{name:12} {row[0]:>9} {row[1]:>9} {row[2]:>11} {row[3]:>10} {row[4]:>9}", flush=True)
        for number, finding in enumerate(got["findings"]):
            kept = folder / f"{name}.{number}.finding"
            kept.write_bytes(base64.b64decode(finding["input"]))
            print(f"  {finding['error']}\n    {kept}\n{finding['trace']}", flush=True)
        bad += len(got["findings"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
