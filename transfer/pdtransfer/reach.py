"""Who can write into whose memory, and who is dead: the facts behind the fences.

Over TCP, InfiniBand and emulated puts the receiving agent takes part in every write, so that
nothing lands once it is destroyed. Over CMA (process_vm_writev) and CUDA IPC the writing process does
it alone: measured over CMA, the rest of a posted transfer landed after the receiving agent was
destroyed. Such a writer is fenced by its acknowledgement or by its death only; both transports need
one host (CMA one PID namespace too), where the death of a process can be looked up.
"""

from __future__ import annotations

import os
from pathlib import Path

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard, RankProcess

_SM = frozenset({"all", "sm", "shm"})
_WORDS = {
    "cma": _SM | {"cma"},
    "xpmem": _SM | {"mm", "xpmem"},
    "knem": _SM | {"knem"},
    "cuda_ipc": frozenset({"all", "cuda", "cuda_ipc"}),
    "rocm_ipc": frozenset({"all", "rocm", "rocm_ipc"}),
    "ze_ipc": frozenset({"all", "ze", "ze_ipc"}),
}
"""Transports that need no help of the receiver, and the words of UCX_TLS that stand for them (UCX's aliases)."""
_MODULES = ("xpmem", "knem")
"""Those that need a kernel module of that name."""


def this_process() -> RankProcess | None:
    """Identity of the calling process; None where /proc does not tell."""
    started = _started(os.getpid())
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None
    if started is None:
        return None
    return RankProcess(host=host, pid_namespace=namespace, pid=os.getpid(), started=started)


def same_namespace(mine: RankCard, peer: RankCard) -> bool:
    """True when the two are processes of one PID namespace of one host."""
    a, b = mine.process, peer.process
    return a is not None and b is not None and (a.host, a.pid_namespace) == (b.host, b.pid_namespace)


def is_dead(process: RankProcess) -> bool:
    """True when a process of this PID namespace surely runs no more. A zombie writes nothing, once its
    other threads have ended too."""
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it lives; /proc may hide it
    except OverflowError:
        return False  # no process has such a number: its card tells nothing
    stat = _stat(process.pid)
    if stat is None:
        return False
    state, threads, started = stat[0], int(stat[17]), int(stat[19])
    return started != process.started or (state in "ZX" and threads <= 1)


def revocable(mine: RankCard, peer: RankCard) -> bool:
    """True when destroying `mine`'s agent stops every write of `peer`. When it is not known whether
    they share a host, they do. (The host of `mine` must be this one: its kernel modules are looked at.)"""
    a, b = mine.process, peer.process
    one_host = a is None or b is None or a.host == b.host
    one_namespace = one_host and (a is None or b is None or a.pid_namespace == b.pid_namespace)
    direct = {"cma"} if one_namespace else set()
    if one_host:
        direct |= {m for m in _MODULES if Path(f"/sys/module/{m}").exists()}
        if any(r.memory is MemoryKind.VRAM for r in mine.layout.regions) and not mine.layout.emulated_vram:
            direct |= {"cuda_ipc", "rocm_ipc", "ze_ipc"}
    return not any(may_use(mine.transports, d) and may_use(peer.transports, d) for d in direct)


def may_use(transports: tuple[str, ...], transport: str) -> bool:
    """True when UCX_TLS `transports` (empty: UCX chooses) admit `transport`."""
    words = [t.strip().lower().lstrip("\\").partition(":")[0] for t in transports if t.strip()]
    names = _WORDS[transport]
    if words and words[0].startswith("^"):
        return not names & ({words[0][1:], *words[1:]} - {"all"})
    return bool(names & set(words or ["all"]))


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; None when they can't be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def _started(pid: int) -> int | None:
    stat = _stat(pid)
    return int(stat[19]) if stat is not None else None
