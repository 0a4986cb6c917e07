"""What a container said last, made fit for a condition: one or two lines, bounded, without secrets.

The kubelet gives the end of the log (terminationMessagePolicy FallbackToLogsOnError): usage texts,
tracebacks and progress bars, in which the line that matters is near the end.
"""

from __future__ import annotations

import re

LIMIT = 300
"""Characters that are kept."""
_LOOKED_AT = 12
"""Lines from the end in which an error is looked for: what stands above belongs to an earlier story."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_STAMP = re.compile(r"^\s*\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?\s*")
"""A time would make every restart a new message."""
_BLANKS = re.compile(r"\s+")
_ERROR = re.compile(r"error|exception|fatal|critical|failed|failure|cannot|can not|can't|not found|is not|refus|denied"
                    r"|out of memory|no such|killed|abort|unrecognized|invalid|unable", re.IGNORECASE)  # fmt: skip
_TRACE = re.compile(r"^\s*(File \"|at |\^+\s*$|~+|Traceback|\[rank|During handling|The above exception)|^\s{4}")
_RULE = re.compile(r"^[\W_]*$")
"""Lines without a word: rules, frames, lone brackets."""

_SECRETS = (
    (re.compile(r"(?i)\b(authorization\s*[:=]\s*)(?:(?:bearer|basic)\s+)?\S+"), r"\1***"),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}"), r"\1***"),
    (
        re.compile(
            r"""(?ix)\b([\w.-]*(?:token|secret|password|passwd|api[_-]?key|access[_-]?key|credential)[\w.-]*
                ["']?\s*[:=]\s*["']?)[^\s"',;&]+"""
        ),
        r"\1***",
    ),
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), "hf_***"),
    (re.compile(r"\b(sk-|ghp_|xox[abp]-|AKIA)[A-Za-z0-9_-]{8,}"), r"\1***"),
    (re.compile(r"(://)[^/\s:@]+:[^/\s@]+@"), r"\1***@"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(\.[\w-]+)?"), "***"),
)


def last_words(text: str, limit: int = LIMIT, *, errors_only: bool = False) -> str:
    """The last line that speaks of an error, else (unless `errors_only`) the last one that says anything; '' for
    nothing."""
    lines = [_clean(line) for line in text.replace("\r", "\n").split("\n")]
    told = [line for line in lines if line.strip() and not _RULE.match(line) and not _TRACE.match(line)]
    if not told:
        return ""
    recent = told[-_LOOKED_AT:]
    chosen = next((line for line in reversed(recent) if _ERROR.search(line)), "" if errors_only else recent[-1])
    said = _STAMP.sub("", chosen, count=1) or chosen
    return bounded(redact(_BLANKS.sub(" ", said).strip()), limit)


def bounded(text: str, limit: int = LIMIT) -> str:
    """At most `limit` characters; the beginning says what it is about, so the end is cut."""
    return text if len(text) <= limit else text[: limit - 3].rstrip() + "..."


def redact(text: str) -> str:
    """Without what looks like a credential. A net with holes: engines should not log secrets at all."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def one_line(text: str, limit: int = LIMIT) -> str:
    """All of a short message on one line, cleaned, bounded and without secrets."""
    return bounded(redact(_BLANKS.sub(" ", _clean(text.replace("\n", " "))).strip()), limit)


def _clean(line: str) -> str:
    return _UNPRINTABLE.sub("", _ESCAPES.sub("", line.replace("\t", "    ")))
