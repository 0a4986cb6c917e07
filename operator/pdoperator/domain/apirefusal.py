"""What the API server refused, in words for a condition, and what to do about it."""

from __future__ import annotations

from pdoperator.api.conditions import Reason
from pdoperator.domain.lastwords import one_line

_ADVICE = {
    Reason.API_FORBIDDEN: "Check the operator's ClusterRole.",
    Reason.ADMISSION_REFUSED: "Raise the quota or lower what the role asks for; for Pod Security set "
    "template.securityContext and template.containerSecurityContext, or the namespace's level.",
}


def refusal_reason(word: str) -> Reason:
    """The Reason of that name; APIError for any other word."""
    try:
        return Reason(word)
    except ValueError:
        return Reason.API_ERROR


def refusal_text(message: str, word: str) -> str:
    """The refusal on one line, and what to do."""
    text = one_line(message, 1000)
    advice = _ADVICE.get(refusal_reason(word), "")
    return f"{text}. {advice}" if advice else text
