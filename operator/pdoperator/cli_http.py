"""GET of JSON from a server that may be slow, wrong or not there, within a deadline. Only the standard library:
`pdcluster preflight` needs no more than the base installation."""

from __future__ import annotations

import http.client
import json
import queue
import re
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_BODY = 16 << 20
_HOST = re.compile(r"[\w.:%-]{1,253}")


@dataclass(frozen=True)
class Answer:
    """An HTTP answer with a body of JSON, or why there is none: `problem` is '' where `body` counts."""

    status: int = 0
    body: Any = None
    problem: str = ""


class BadURL(ValueError):
    """The text is no address of a server; the message says why."""


class BadKey(ValueError):
    """The text is no API key; the message does not repeat it."""


def server_url(text: str) -> str:
    """`http(s)://host:port`, with http:// before a bare `host:port`. Raises BadURL."""
    url = text if "://" in text else f"http://{text}"
    said = repr("...@" + text.rpartition("@")[2] if "@" in text else text)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadURL(f"{said} is no URL" + ("" if "@" in text else f": {error}")) from None
    if parts.scheme not in ("http", "https") or not host:
        raise BadURL(f"{said} is no http or https URL")
    if parts.username or parts.password:
        raise BadURL(f"{said}: a password in a URL is not taken; set PDCLUSTER_API_KEY")
    if parts.query or parts.fragment or parts.path.strip("/"):
        raise BadURL(f"{said}: give the server's address only, without a path")
    if not _HOST.fullmatch(host) or port == 0:
        raise BadURL(f"{said}: no server has such an address")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port else "")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
"""Servers are asked directly: a proxy's answer would say nothing about them."""


def api_key(text: str) -> str:
    """A key as it goes into a header, without the end of a line that `$(cat FILE)` or an editor left. Raises BadKey."""
    key = text.strip()
    if any(not " " < c < "\x7f" for c in key):
        raise BadKey("it has characters that no HTTP header can have")
    return key


def get_json(url: str, timeout: float, key: str = "") -> Answer:
    """GET `url` within `timeout` seconds in all, however slowly it answers. Never raises for what comes back."""
    done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    # A daemon: a server that sends a byte a second must not keep the command alive past its deadline.
    threading.Thread(target=lambda: done.put(_get(url, timeout, key)), daemon=True).start()
    try:
        return done.get(timeout=timeout)
    except queue.Empty:
        return Answer(problem=f"no answer within {timeout:g} s")


def _get(url: str, timeout: float, key: str) -> Answer:
    try:
        request = urllib.request.Request(url, headers={"Accept": "application/json"})
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with _OPENER.open(request, timeout=timeout) as answer:
            status = answer.status
            data = answer.read(MAX_BODY + 1)
    except urllib.error.HTTPError as error:
        return Answer(error.code, problem=f"HTTP {error.code} {error.reason}")
    except urllib.error.URLError as error:
        reason = error.reason
        return Answer(problem=_plain(reason) if isinstance(reason, BaseException) else str(reason))
    except (OSError, http.client.HTTPException) as error:
        return Answer(problem=_plain(error))
    except UnicodeError:
        return Answer(problem="its host is no name that DNS could know")
    except Exception as error:  # Nobody would hear of it: this thread has no caller. Its text could hold the key.
        return Answer(problem=f"asking it failed ({type(error).__name__})")
    if len(data) > MAX_BODY:
        return Answer(status, problem=f"its answer is larger than {MAX_BODY >> 20} MiB")
    try:
        return Answer(status, json.loads(data))
    except ValueError:
        return Answer(status, problem=f"its answer is no JSON: {data[:60]!r}")
    except RecursionError:
        return Answer(status, problem="its answer is nested too deeply")


def _plain(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"{type(error).__name__}: {error}".rstrip(": ")
