"""Which writers a new agent fences, and which processes are dead. Values are the rules of UCX's transports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from kv_world import Pool, template

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard, RankProcess, first_agent, later_agent
from pdtransfer.contract.layout import Region, RegionKind
from pdtransfer.reach import is_dead, may_use, revocable, same_namespace, this_process

HERE = RankProcess(host="boot-1", pid_namespace=7, pid=10, started=100)
OTHER_POD = HERE.model_copy(update={"pid_namespace": 8})
OTHER_HOST = HERE.model_copy(update={"host": "boot-2"})


def card(
    transports: str = "", process: RankProcess | None = HERE, memory: str = "DRAM", emulated: bool = False
) -> RankCard:
    made = template(Role.DECODE, Pool(0, 1, memory), "i", emulated=emulated)
    regions = (Region(layer=0, kind=RegionKind("K"), item_bytes=8, items=1, memory=memory, address=0, device=0),)
    words = tuple(t for t in transports.split(",") if t)
    layout = made.layout.model_copy(update={"regions": regions})
    return made.model_copy(update={"layout": layout, "transports": words, "process": process})


@pytest.mark.parametrize(
    ("transports", "cma", "cuda_ipc", "xpmem"),
    [
        ("", True, True, True),
        ("all", True, True, True),
        ("tcp", False, False, False),
        ("rc,tcp", False, False, False),
        ("^cma", False, True, True),
        ("^cma,xpmem", False, True, False),
        ("^cuda", True, False, True),
        ("^sm", False, True, False),
        ("sm,tcp", True, False, True),
        ("shm", True, False, True),
        ("mm,tcp", False, False, True),
        ("cma,tcp", True, False, False),
        ("cma:aux,\\tcp", True, False, False),
        ("rc,cuda", False, True, False),
        ("tcp,cuda_copy,cuda_ipc", False, True, False),
        ("tcp,cuda_copy", False, False, False),
        ("posix,sysv,tcp", False, False, False),
    ],
)
def test_words_of_ucx_tls(transports, cma, cuda_ipc, xpmem):
    words = tuple(t for t in transports.split(",") if t)
    assert (may_use(words, "cma"), may_use(words, "cuda_ipc"), may_use(words, "xpmem")) == (cma, cuda_ipc, xpmem)


@pytest.mark.parametrize(
    ("mine", "peer", "fenced"),
    [
        (card(), card(), False),  # CMA
        (card(), card(process=OTHER_POD), True),  # CMA needs one PID namespace
        (card(), card(process=OTHER_HOST), True),
        (card(), card(process=None), False),  # not known: assume the worst
        (card("tcp"), card(), True),
        (card(), card("tcp"), True),
        (card("^cma"), card(), True),
        (card("tcp"), card(process=None), True),
        (card(memory="VRAM"), card(process=OTHER_POD), False),  # CUDA IPC needs one host only
        (card(memory="VRAM"), card(process=OTHER_HOST), True),
        (card(memory="VRAM", emulated=True), card(process=OTHER_POD), True),
        (card("rc,cuda_copy", memory="VRAM"), card(process=OTHER_POD), True),
    ],
)
def test_whom_a_new_agent_fences(mine, peer, fenced):
    assert revocable(mine, peer) is fenced


def test_kernel_modules_reach_across_pods_of_one_host(monkeypatch):
    there = {"/sys/module/xpmem"}
    monkeypatch.setattr("pathlib.Path.exists", lambda path: str(path) in there)
    assert not revocable(card(), card(process=OTHER_POD))
    assert revocable(card("posix,tcp"), card(process=OTHER_POD))
    assert revocable(card(), card(process=OTHER_HOST))
    there.clear()
    assert revocable(card(), card(process=OTHER_POD))


def test_the_own_process_lives_and_one_that_had_its_number_does_not():
    me = this_process()
    assert me is not None and me.pid == os.getpid() and not is_dead(me)
    assert is_dead(me.model_copy(update={"started": me.started - 1}))
    assert same_namespace(card(process=me), card(process=me.model_copy(update={"pid": 1})))
    assert not same_namespace(card(process=me), card(process=None))


def test_a_process_is_dead_once_it_was_killed_and_not_when_it_is_stopped():
    code = "from pdtransfer.reach import this_process; print(this_process().model_dump_json(), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        process = RankProcess.model_validate_json(child.stdout.readline())
        assert not is_dead(process)
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert not is_dead(process)
        child.kill()
        until = time.monotonic() + 60
        while not is_dead(process):  # a zombie: nobody has waited for it
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait(30)
    assert is_dead(process)


@pytest.mark.parametrize("number", [0, 1, 12])
def test_names_of_generations(number):
    assert first_agent(later_agent("decode-0-ab", number), number) == "decode-0-ab"
    assert later_agent("decode-0-ab", number) == ("decode-0-ab" if not number else f"decode-0-ab.{number}")
