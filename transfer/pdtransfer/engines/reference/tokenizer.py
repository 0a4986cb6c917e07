"""Text to token ids and back, from the checkpoint's tokenizer.json; chat template where there is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pdtransfer.engines.reference.problems import RequestError, SetupError


class TextCodec:
    """The checkpoint's tokenizer."""

    def __init__(self, folder: Path, vocab: int) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise SetupError(f"{path} is not there; the Reference engine reads a fast tokenizer (tokenizer.json)")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise SetupError(f"{path} can not be parsed as a tokenizer: {error}") from error
        if self._tokenizer.get_vocab_size() > vocab:
            raise SetupError(
                f"{path} has {self._tokenizer.get_vocab_size()} entries, config.json's vocab_size is {vocab}: "
                "tokenizer and model are not of one checkpoint"
            )
        self._template = _chat_template(folder)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens the tokenizer adds by itself."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt of a conversation: by the checkpoint's own template, else one `role: text` a line."""
        if self._template is None:
            turns = [f"{m['role']}: {_text(m.get('content'))}" for m in messages]
            return "\n".join([*turns, "assistant:"])
        # jinja2 comes with torch; loaded only when a checkpoint has a template.
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        try:
            template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
                self._template["chat_template"]
            )
            names = {k: v for k, v in self._template.items() if k.endswith("_token")}
            return template.render(messages=messages, add_generation_prompt=True, **names)
        except TemplateError as error:
            raise RequestError("BadRequest", f"the chat template refuses the messages: {error}", 400) from error


def _text(content: object) -> str:
    """Content of a message: a string, or OpenAI's list of parts (text only)."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(p.get("text", "")) for p in content)
    raise RequestError("BadRequest", "message content must be text", 400)


def _chat_template(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} can not be read as JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("chat_template"), str):
        return None
    tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in data.items() if k.endswith("_token")}
    return {**tokens, "chat_template": data["chat_template"]}
