"""What a client and a reader of the servers' output are told, in short."""

from __future__ import annotations

import re

from kit_faults import Heard
from kit_server import Server

RIGHT = "the right tokens"
LINE = 220
"""Characters of a message that are shown."""
RAISED = re.compile(r"(?:\w+\.)*\w+(?:Error|Exception|Failure): .+")
STAMP = re.compile(r"^\[[^]]*\]\s*")
SPOKEN = re.compile(r"mlx5|transport|\btcp\b|\bcma\b|\bsysv\b", re.IGNORECASE)


def told(what: Heard, expected: list[int] | None = None) -> str:
    """What a client got; an answer that should have been these tokens is said to be right or wrong."""
    if what.status == -1:
        return "nothing"
    if what.status == 0:
        return "the connection ended without an answer"
    if what.status == 200 and expected is not None:
        found = re.search(r'"output_ids":\s*\[([^]]*)\]', what.text)
        got = [int(token) for token in found[1].split(",") if token.strip()] if found else None
        if got == expected:
            return RIGHT
        if got is not None:
            return f"HTTP 200 with WRONG TOKENS: {got} for {expected}"
    message = re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', what.text)
    text = message[1] if message else what.text
    text = " ".join(re.sub(r"^.*with exception ", "", text).split())
    return f"HTTP {what.status}: {text[:LINE]}"


def known(what: Heard) -> float | None:
    """Seconds, None where nothing was heard."""
    return None if what.status == -1 else what.seconds


def output(server: Server, since: int = 0) -> str:
    """What it printed after that many bytes."""
    return server.log.read_bytes()[since:].decode(errors="replace")


def raised(server: Server, since: int = 0) -> list[str]:
    """The last exception that its output shows; empty: none after the first `since` bytes."""
    errors = exceptions(output(server, since).splitlines())
    return [f"{server.setting.role} raised {errors[-1]}"] if errors else []


def exceptions(lines: list[str]) -> list[str]:
    """Those among these lines of output, shortened."""
    found = (RAISED.match(STAMP.sub("", line)) for line in lines)
    return [" ".join(match[0].split())[:LINE] for match in found if match]


def lives(server: Server) -> str:
    """Do its processes run, and what does it say of itself."""
    role = server.setting.role
    if server.ended() or not server.schedulers():
        return f"{role} is DEAD"
    return f"{role}'s /health is {'200' if server.healthy() else 'not 200'}"


def released_anyway(server: Server, since: int = 0) -> list[str]:
    """SGLang's word that it lent pages out again while its peer may still write to them; empty: it said no such thing
    after the first `since` bytes of its output."""
    found = re.search(r"Deferred KV release for room \d+ (.*releasing anyway)", output(server, since))
    return [f"{server.setting.role} says: 'KV release … {found[1]}'"] if found else []


def spoken(servers: list[Server]) -> str:
    """Lines of the servers' output about the adapter or the transport, without their time stamps."""
    found: list[str] = []
    for server in servers:
        for line in output(server).splitlines():
            if SPOKEN.search(line) and "server_args" not in line and "ServerArgs" not in line:
                text = STAMP.sub("", line)[:160]
                if text not in found:
                    found.append(text)
    return " / ".join(found[:3]) or "nothing about it"
