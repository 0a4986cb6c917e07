"""One TP rank: a process that loads its shard, owns its KV pool and endpoint, and obeys the leader.

    python -m pdtransfer.engines.reference.rank FD      (FD: the rank's end of the leader's pipe)

It ends when the pipe ends, when the leader dies, or on any error of its own (which it names first).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from pdtransfer.engines.reference.messages import (
    AbortTransfer,
    Configure,
    Drain,
    Introduce,
    LeaderMessage,
    RankDraining,
    RankFailed,
    RankReady,
    Receive,
    SendFinish,
    SendOpen,
    Step,
    StepDone,
    Stop,
    TransferUpdate,
)
from pdtransfer.engines.reference.problems import SetupError

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1
ACTIVE_POLL_S = 0.005
IDLE_POLL_S = 1.0


def main() -> None:
    """Run the rank whose pipe is file descriptor argv[1]; never returns."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A terminal's Ctrl-C and the pod's SIGTERM are the leader's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection: Connection[object, object] = Connection(int(sys.argv[1]))
    configure = connection.recv()
    assert isinstance(configure, Configure)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank{configure.rank} %(levelname)s %(message)s")
    code = 1
    try:
        code = _run(connection, configure)
    except SetupError as error:
        code = 2
        _tell(connection, RankFailed(configure.rank, True, str(error)))
    except EOFError:
        log.error("the leader closed the pipe")
    except BaseException:
        text = traceback.format_exc()
        log.error("rank %d ends: %s", configure.rank, text)
        _tell(connection, RankFailed(configure.rank, False, text))
    logging.shutdown()
    # No interpreter teardown: threads of NIXL and gloo may still wait for peers that are gone.
    os._exit(code)


def _tell(connection: Connection[object, object], message: RankFailed) -> None:
    try:
        connection.send(message)
    except OSError:
        log.error("the leader is gone: %s", message.text)


def _run(connection: Connection[object, object], configure: Configure) -> int:
    started = time.monotonic()
    # torch is imported here, so that a wrong flag is refused before its seconds are spent.
    from pdtransfer.engines.reference.rank_build import build_rank

    rank = build_rank(configure, started)
    connection.send(RankReady(configure.rank, rank.facts, rank.card))
    drain_told = False
    try:
        while True:
            timeout = ACTIVE_POLL_S if rank.transfers.active else IDLE_POLL_S
            woken = wait([connection, rank.wake.fileno()], timeout)
            if rank.wake.fileno() in woken:
                rank.wake.clear()
            while connection.poll(0):
                message: LeaderMessage = connection.recv()  # type: ignore[assignment]
                match message:
                    case Step():
                        sampled = rank.step(message)
                        if configure.rank == 0:
                            connection.send(StepDone(message.number, sampled))
                    case SendOpen() | SendFinish() | Receive() | AbortTransfer():
                        rank.transfers.handle(message)
                    case Introduce():
                        rank.introduce(message.cards)
                    case Drain():
                        rank.drain()
                    case Stop():
                        return 0
                _report(connection, rank.transfers.poll())
            _report(connection, rank.transfers.poll())
            rank.check()
            if rank.told_to_drain and not drain_told:
                drain_told = True
                connection.send(RankDraining(configure.rank))
    finally:
        rank.close()


def _report(connection: Connection[object, object], updates: Sequence[TransferUpdate]) -> None:
    for update in updates:
        connection.send(update)


if __name__ == "__main__":
    main()
