"""One rank in a process of its own, over real NIXL: asked by JSON lines (asked_process.py).

python rank_process.py ROLE TP TP_SIZE INCARNATION MEMORY TLS_DIR PAGES

MEMORY is DRAM, VRAM or mixed (VRAM emulated on host memory), gpu:VRAM or gpu:mixed.
RANK_HOST, RANK_PORT, RANK_DEVICES and RANK_POD name another address, a fixed port, other network devices than
loopback, and another pod. RANK_OPTIONS is JSON: `timeouts` and `config` (fields of Timeouts and EndpointConfig),
`bootstrap`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time

from asked_process import say
from kv_world import BOOTSTRAP, READY, TOKENS, Pool, template
from places import place_of

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.session.api import EndpointConfig, Timeouts
from pdtransfer.session.endpoint import RankEndpoint


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    role, tp, tp_size, incarnation, memory, tls, many = sys.argv[1:8]
    place, memory = place_of(memory)
    pool = Pool(int(tp), int(tp_size), memory, pages=int(many), place=place)
    host = os.environ.get("RANK_HOST", "127.0.0.1")
    options = json.loads(os.environ.get("RANK_OPTIONS", "{}"))
    # Long, for machines that stand still for seconds: a test whose subject is a deadline gives its own.
    times = {"waiting": 30, "transfer": 30, "settle": 0.5, "connect": 10, "probe": 30, **options.get("timeouts", {})}
    config = EndpointConfig(
        listen_host=host,
        advertise_host=host,
        control_port=int(os.environ.get("RANK_PORT", "0")),
        net_devices=os.environ.get("RANK_DEVICES", "lo"),
        tls_dir=tls or None,
        timeouts=Timeouts(**times),
        **options.get("config", {}),
    )
    card = template(Role(role), pool, incarnation, pod=os.environ.get("RANK_POD", ""), emulated=place.emulated)
    if card.bootstrap and "bootstrap" in options:
        card = card.model_copy(update={"bootstrap": options["bootstrap"]})
    endpoint = RankEndpoint(card, pool.regions, config)

    say(card=endpoint.card.model_dump_json())
    transfers: dict[int, object] = {}
    never = threading.Event()
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if "count" in command:
            command["pages"] = range(command["first"], command["first"] + command["count"])
            if "shuffle" in command:  # no runs: one descriptor a page and region
                command["pages"] = random.Random(command["shuffle"]).sample(command["pages"], command["count"])
        if do == "peers":
            endpoint.apply_peers([RankCard.model_validate_json(c) for c in command["cards"]])
            wired = endpoint.wait_wired(command.get("wait", 45))
            say(wired=wired, verdicts=[v.model_dump(mode="json") for v in endpoint.verdicts])
        elif do == "send":
            room, pages = command["room"], command["pages"]
            if "count" not in command:
                pool.fill(room, pages)
            elif not next(iter(pool.arrays.values()))[pages[0]].any():
                for array in pool.arrays.values():  # zeros that land late could not be seen
                    array.view("uint8")[:] = 3
            sender = endpoint.send(room=room, tokens=len(pages) * TOKENS - 1)
            step = max(1, len(pages) // 8)
            for i in range(0, len(pages), step):
                last = i + step >= len(pages)  # `hold`: it is never ready, so the transfer can not be over too early
                sender.chunk(pages[i : i + step], i, never if last and command.get("hold") else READY)
            sender.finish(b"room %d" % room)
            transfers[room] = sender
            say(ok=True)
        elif do == "receive":
            room, pages = command["room"], command["pages"]
            transfers[room] = endpoint.receive(
                room=room,
                attempt=0,
                bootstrap=command.get("bootstrap", BOOTSTRAP),
                pages=pages,
                tokens=len(pages) * TOKENS - 1,
            )
            say(ok=True)
        elif do == "wait":
            transfer = transfers[command["room"]]
            began = time.monotonic()
            state = transfer.wait(command.get("timeout", 45))  # type: ignore[attr-defined]
            metadata = getattr(transfer, "metadata", None)
            say(
                state=state,
                error=str(transfer.error),  # type: ignore[attr-defined]
                kind=type(transfer.error).__name__,  # type: ignore[attr-defined]
                metadata=metadata.decode() if metadata else None,
                seconds=time.monotonic() - began,
                releasable=getattr(transfer, "pages_releasable", None),
            )
        elif do == "check":
            pages = command["pages"]
            everything = command.get("all", pages)
            say(holds=pool.holds(command["room"], pages), untouched=pool.untouched(everything))
        elif do == "reuse":
            # The pages are another request's from now on: a late write would show.
            for array in pool.arrays.values():
                array[:] = 0
            say(ok=True)
        elif do == "paint":
            for array in pool.arrays.values():
                array.view("uint8")[:] = command["value"]
            say(ok=True)
        elif do == "painted":
            # Pages of each region that hold something else.
            value = command["value"]
            others = [
                int((a.view("uint8") != value).reshape(len(a), -1).any(axis=1).sum()) for a in pool.arrays.values()
            ]
            say(others=sum(others))
        elif do == "stop":
            # Stop process `pid` once some of the pages hold something else. Asked from outside and looked at page
            # by page, that would come too late: everything is written within some hundred milliseconds.
            until, landed = time.monotonic() + 60, 0
            firsts = [a.view("uint8").reshape(len(a), -1)[:: command["every"], 0] for a in pool.arrays.values()]
            while landed < command["least"] and time.monotonic() < until:
                landed = sum(int((f != command["value"]).sum()) for f in firsts)
            os.kill(command["pid"], signal.SIGSTOP)
            say(landed=landed, of=sum(map(len, firsts)))
        elif do == "counters":
            say(**endpoint.counters, agent=endpoint.card.generation, failed=str(endpoint.failed or ""))
        elif do == "verdicts":
            say(verdicts=[v.model_dump(mode="json") for v in endpoint.verdicts])
        elif do == "close":
            endpoint.close()
            say(closed=endpoint.failed is None)
            return


main()
