"""Checks what a client asks for; every refusal is a RequestError with status 400 that says why. Pure."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdtransfer.engines.reference.messages import Sampling
from pdtransfer.engines.reference.options import Options
from pdtransfer.engines.reference.problems import RequestError
from pdtransfer.engines.reference.requests import Asked

DEFAULT_NEW_TOKENS = 128
NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
}
"""Parameters of SGLang that this engine knows only at their neutral value."""
UNSUPPORTED = ("regex", "json_schema", "ebnf", "structural_tag", "logit_bias")
_seeds = itertools.count(1)


@dataclass(frozen=True)
class Limits:
    """What the model and the engine allow. `eos` ends an answer unless ignore_eos."""

    context: int
    vocab: int
    eos: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """One prompt of a request, checked; `stop` are strings that end the text."""

    asked: Asked
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0


def bad(message: str) -> RequestError:
    """A request that can never work."""
    return RequestError("BadRequest", message, 400)


def number(data: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    """data[key] as a number in low .. high."""
    value = data.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(f"{key} must be a number, not {value!r}")
    if not low <= value <= high:
        raise bad(f"{key} must be in {low:g} .. {high:g}, not {value!r}")
    return value


def strings(value: object, key: str) -> tuple[str, ...]:
    """A string or a list of strings; None is the empty list."""
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(s, str) for s in found):
        raise bad(f"{key} must be a string or a list of strings")
    return tuple(s for s in found if s)


def make_job(
    options: Options,
    limits: Limits,
    prompt: Sequence[int],
    params: Mapping[str, Any],
    *,
    rid: str = "",
    bootstrap: tuple[Any, Any, Any] = (None, None, None),
    logprobs: int | None = None,
) -> Job:
    """Check one prompt with SGLang's sampling_params. `logprobs`: None for none, else how many
    alternatives a token; `bootstrap`: host, port and room as the request gave them."""
    if not prompt:
        raise bad("the prompt is empty")
    if any(isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < limits.vocab for t in prompt):
        raise bad(f"input_ids must be integers in 0 .. {limits.vocab - 1}")
    for key, neutral in NEUTRAL.items():
        if params.get(key) not in (None, neutral):
            raise bad(f"sampling parameter {key}={params[key]!r} is not supported by the Reference engine")
    for key in UNSUPPORTED:
        if params.get(key):
            raise bad(f"sampling parameter {key} is not supported by the Reference engine")
    room_left = limits.context - len(prompt)
    if room_left < 1:
        raise bad(
            f"the prompt has {len(prompt)} tokens, the context length is {limits.context}, "
            "which must also hold the answer"
        )
    asked_new = params.get("max_new_tokens")
    most = int(number(params, "max_new_tokens", min(DEFAULT_NEW_TOKENS, room_left), 1, 1 << 31))
    if asked_new is not None and most > room_left:
        raise bad(
            f"{len(prompt)} prompt tokens and max_new_tokens {most} exceed the context length of "
            f"{limits.context} tokens"
        )
    seed = params.get("sampling_seed")
    sampling = Sampling(
        temperature=number(params, "temperature", 1.0, 0, 1e6),
        top_p=number(params, "top_p", 1.0, 1e-9, 1),
        top_k=int(number(params, "top_k", -1, -1, 1 << 31)),
        seed=int(seed) if isinstance(seed, int) else options.seed + next(_seeds),
        logprob=logprobs is not None,
        top_logprobs=logprobs or 0,
    )
    stops = params.get("stop_token_ids") or []
    if not isinstance(stops, list) or not all(isinstance(s, int) for s in stops):
        raise bad("stop_token_ids must be a list of integers")
    room, address = _bootstrap(options, *bootstrap)
    eos = () if params.get("ignore_eos") else limits.eos
    asked = Asked(rid or uuid.uuid4().hex, tuple(prompt), most, sampling, frozenset([*stops, *eos]), room, address)
    return Job(asked, strings(params.get("stop"), "stop"), logprobs or 0)


def _bootstrap(options: Options, host: Any, port: Any, room: Any) -> tuple[int | None, str]:
    if not options.disaggregated:
        return None, ""
    if room is None:
        raise bad(
            f"Disaggregated request received without bootstrap room id: this is a {options.mode} engine; "
            "send requests through the router"
        )
    if isinstance(room, bool) or not isinstance(room, int) or not 0 <= room < 1 << 63:
        raise bad(f"bootstrap_room must be an integer of 63 bits, not {room!r}")
    if options.mode == "prefill":
        return room, ""
    if not isinstance(host, str) or not host:
        raise bad("bootstrap_host is missing: a decode engine must know which prefill holds the KV")
    if port is None:
        port = options.bootstrap_port
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise bad(f"bootstrap_port must be a port number, not {port!r}")
    return room, f"{host}:{port}"


def per_prompt(value: object, count: int, key: str, batched: bool) -> list[Any]:
    """A field that is one value for all prompts, or a list with one value for each."""
    if not isinstance(value, list):
        return [value] * count
    if not batched and len(value) != 1:
        raise bad(f"{key} is a list of {len(value)}, but there is one prompt")
    if len(value) != count:
        raise bad(f"{key} has {len(value)} values for {count} prompts")
    return list(value)


def rooms(value: object, count: int, batched: bool) -> list[Any]:
    """Bootstrap rooms: each prompt needs its own; a scalar room counts up over a batch, as in SGLang."""
    if batched and count > 1 and isinstance(value, int) and not isinstance(value, bool):
        return [value + i for i in range(count)]
    return per_prompt(value, count, "bootstrap_room", batched)
