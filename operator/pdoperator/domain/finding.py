"""One line of a preflight answer, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    text = text.strip()
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ")")) else ".")


@dataclass(frozen=True)
class Finding:
    """One line of a preflight answer. `status`: Pass, Warn, Fail or Unknown."""

    rule: str
    status: str
    message: str
    action: str = ""

    @property
    def text(self) -> str:
        """Rule, message and action in one line."""
        return f"{self.rule}: {sentence(self.message)} {sentence(self.action)}".strip()

    def to_dict(self) -> dict[str, str]:
        """The four fields, as `pdcluster preflight -o json` prints them."""
        return {"rule": self.rule, "status": self.status, "message": self.message, "action": self.action}


def fail(rule: str, message: str, action: str) -> Finding:
    """Nothing new is launched while this holds."""
    return Finding(rule, "Fail", message, action)


def warn(rule: str, message: str, action: str) -> Finding:
    """It works, but not as one might expect."""
    return Finding(rule, "Warn", message, action)
