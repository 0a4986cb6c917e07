"""Every decoder on some hundred odd inputs, in the suite; `make fuzz SECONDS=600` runs the same for long. And the
fuzzer itself must find what is wrong (negative controls)."""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
import subprocess
import sys
import time
import typing
from pathlib import Path

import fuzz_run
import pytest
from fuzz_mutate import Mutator
from fuzz_targets import FRAMES, targets

from pdtransfer.session import frames

INPUTS = 150
NAMES = tuple(targets())


@pytest.mark.parametrize("name", NAMES)
def test_no_input_crashes_hangs_or_fills_memory(name, tmp_path):
    target = targets()[name]
    getattr(target.run, "start", bool)()
    found = fuzz_run.fuzz(target.run, target.corpus, 120.0, 1, tmp_path / "input", most=INPUTS)
    if name == "live-peer":
        target.run.close()  # type: ignore[attr-defined]
    assert found["findings"] == []
    assert found["inputs"] == INPUTS and found["outcomes"] > 3, found


def test_every_valid_input_is_taken():
    """Else the mutations start from something that is refused at once, and reach nothing."""
    every = targets()
    assert [every["frame"].run(f.model_dump_json().encode()) for f in FRAMES] == [type(f).__name__ for f in FRAMES]
    handed_on = [f for f in FRAMES if not isinstance(f, frames.Ping | frames.Pong)]  # keep-alive is the channel's own
    assert every["channel"].run(every["channel"].corpus[0]) == f"{len(handed_on)} end"
    assert every["card"].run(every["card"].corpus[0]) == "card fits"
    assert every["roster"].run(every["roster"].corpus[0]) == "roster taken"
    assert every["rank-lines"].run(every["rank-lines"].corpus[0]) == "hello heartbeat verdicts 2 0"
    assert every["rank-metrics"].run(every["rank-metrics"].corpus[0]) == "hello heartbeat 2 0"
    assert every["link-lines"].run(every["link-lines"].corpus[0]) == "1 1 1"
    assert [every["control-api"].run(c) for c in every["control-api"].corpus] == [
        *("PUT 200", "GET 200", "GET 200", "POST 202", "POST 200"),
    ]
    assert all("refused" not in every["hf-config"].run(c) for c in every["hf-config"].corpus[:4])


def test_each_kind_of_frame_is_in_the_corpus():
    assert {type(f) for f in FRAMES} == set(typing.get_args(frames.Frame))


# --- negative controls: the fuzzer finds a decoder that is broken -----------------------------------


def test_a_wrong_exception_is_a_finding_with_its_input(tmp_path):
    def careless(data: bytes) -> str:
        try:
            return type(frames.decode(data)).__name__ + str(1 // (b"-" not in data or b"first_page" not in data))
        except frames.FrameError:
            return "refused"

    corpus = tuple(f.model_dump_json().encode() for f in FRAMES)
    found = fuzz_run.fuzz(careless, corpus, 120.0, 1, tmp_path / "input", most=20_000)
    assert found["findings"] and "ZeroDivisionError" in found["findings"][0]["error"]
    data = base64.b64decode(found["findings"][0]["input"])
    with pytest.raises(ZeroDivisionError):
        careless(data)


@pytest.mark.parametrize("how", ["waits", "computes"])
def test_a_hang_is_a_finding(tmp_path, monkeypatch, how):
    monkeypatch.setattr(fuzz_run, "WAIT_SECONDS" if how == "waits" else "INPUT_SECONDS", 0.2)

    def hangs(data: bytes) -> str:
        while b"\xff" in data:
            time.sleep(0.01 if how == "waits" else 0)
        return "ok"

    found = fuzz_run.fuzz(hangs, (b"abc\xff",), 120.0, 1, tmp_path / "input", most=1)
    assert "TooSlow" in found["findings"][0]["error"]


def test_memory_that_grows_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_run, "GROWTH", 8 << 20)
    held: list[mmap.mmap] = []

    def leaks(data: bytes) -> str:
        # Memory of the heap may be there already, freed by tests before; a mapping is always new.
        held.append(mmap.mmap(-1, 100_000))
        held[-1].write(b"x" * 100_000)
        return "ok"

    found = fuzz_run.fuzz(leaks, (b"abc",), 120.0, 1, tmp_path / "input", most=800)
    assert "grew by" in found["findings"][-1]["error"]


CRASH = """
import sys
sys.argv[0] = sys.argv[1]
import runpy
names = runpy.run_path(sys.argv[1])
from pathlib import Path
import fuzz_targets, ctypes
def dies(data):
    if len(data) > 3:
        ctypes.string_at(0)
    return "ok"
fuzz_targets.targets = lambda: {"dies": fuzz_targets.Target((b"abcd",), dies)}
names["child"]("dies", 5.0, 1, Path(sys.argv[2]))
"""


def test_a_crash_of_the_process_is_a_finding_with_its_input(tmp_path, monkeypatch):
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    real = subprocess.Popen

    def crashing(command: list[str], **more: object) -> subprocess.Popen[str]:
        assert "--child" in command
        return real([sys.executable, "-c", CRASH, fuzz_run.__file__, command[-1]], **more)  # type: ignore[call-overload]

    monkeypatch.setattr(fuzz_run.subprocess, "Popen", crashing)
    got = fuzz_run.one("dies", 5.0, 1, tmp_path)
    assert "the process ended with -11" in got["findings"][0]["error"]
    assert got["findings"][0]["input"] == "YWJjZA=="
    assert "Segmentation fault" in got["findings"][0]["trace"]


def test_mutations_are_seeded_and_reach_deep(tmp_path):
    corpus = [f.model_dump_json().encode() for f in FRAMES]
    one, two = Mutator(corpus, 5), Mutator(corpus, 5)
    first = [one.next() for _ in range(200)]
    assert first == [two.next() for _ in range(200)]
    taken = 0
    for data in first:
        try:
            frames.decode(data)
            taken += 1
        except frames.FrameError:
            pass
    assert 20 < taken < 180, "mutations should be taken about as often as they are refused"


def test_the_command_line_runs_and_reports(tmp_path):
    ran = subprocess.run(
        [sys.executable, fuzz_run.__file__, "--seconds", "1", "--targets", "frame", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [line.split()[0] for line in ran.stdout.splitlines()][1:] == ["target", "frame"]
    assert Path(fuzz_run.HERE).name == "fuzz"
