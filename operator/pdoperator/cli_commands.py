"""`pdcluster preflight --prefill-args ... --decode-args ...`: do two plain SGLang command lines fit?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdoperator.cli_containers import commands_in
from pdoperator.cli_files import draft_layers, model_geometry, read_text, read_yaml_config
from pdoperator.cli_output import Unreadable
from pdoperator.domain.preflight import Finding
from pdoperator.domain.preflight_outside import (
    Outside,
    Side,
    Stated,
    check_group,
    flag_findings,
    role_finding,
    unread,
)
from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Role
from pdtransfer.contract.geometry import ModelGeometry
from pdtransfer.contract.sglang_cli import (
    BY_DEST,
    Command,
    CommandUnreadable,
    ConfigRefused,
    Flags,
    command_facts,
    has_variable,
    hidden_fact,
    is_read,
    named_role,
    read_flags,
    with_config,
)


@dataclass(frozen=True)
class CommandOptions:
    """What a command line does not tell, as the user states it."""

    model_config: str | None = None
    engine_version: str | None = None
    same_host: bool = False


def read_side(role: Role, text: str, accelerator: Accelerator | None, options: CommandOptions) -> Side:
    """One side from its command line; `@FILE` is read from the file. Raises Unreadable."""
    source = "command line"
    if text.startswith("@"):
        source = text[1:]
        text = read_text(source)
    try:
        command, flags = _of_role(role, commands_in(text))
    except (CommandUnreadable, ConfigRefused) as error:
        raise Unreadable(f"{role.value}'s command line can not be read: {error}") from error
    except Unreadable as error:
        raise Unreadable(f"{role.value}'s command line can not be read: {error}") from error
    unknown = _unknown(role, command, flags)
    findings = [*flag_findings(role, flags, options.engine_version)]
    findings += [Finding("Shell", "Warn", f"{role.value}: {note}.", "Correct it.") for note in command.notes]
    if not flags.given("model_path"):
        findings.append(
            Finding("EngineFlag", "Fail", f"{role.value}: --model-path is missing. SGLang refuses to start.")
        )
    read = command_facts(
        role,
        flags,
        {k: v for k, v in command.environment.items() if k not in unknown},
        unknown=unknown,
        geometry=_geometry(flags, options),
        engine_version=options.engine_version,
        accelerator=accelerator,
    )
    findings += role_finding(role, read.role)
    findings += [Finding("NotRead", "Unknown", f"{role.value}: {p}", "Correct it.") for p in read.problems]
    findings += [
        Finding("EngineFlag", "Fail", f"{role.value}: {p}. SGLang does not start with it.", "Correct the flag.")
        for p in read.impossible
    ]
    findings += [
        Finding(
            "ShellVariable",
            "Unknown",
            f"{role.value}: the value of {_label(name)} is known to the shell that runs the command only",
            "Put its value into the command line.",
        )
        for name in unknown
    ]
    facts = read.facts.model_copy(update={"draft_layers": draft_layers(read.facts.draft_model)})
    assumed = ("environment variables that the command line does not set are not set", *command.assumed)
    return Side(facts, source, tuple(findings), unread(flags), assumed, options.same_host)


def _of_role(role: Role, commands: Sequence[Command]) -> tuple[Command, Flags]:
    """The command to check: the only one, or of a script that starts both sides the one of this role. Raises
    CommandUnreadable."""
    for command in commands:
        if any(a == "--config" and b in command.shell_only for a, b in pairwise(command.arguments)):
            raise CommandUnreadable(
                "only its shell knows which file --config names: put its name into the command line"
            )
    read = [(c, read_flags(with_config(c.arguments, read_yaml_config), c.shell_only)) for c in commands]
    if len(read) == 1:
        return read[0]
    fitting = _one_of_nodes([(c, f) for c, f in read if named_role(f.values) is role])
    if len(fitting) != 1:
        raise CommandUnreadable(
            f"it holds {len(read)} commands of SGLang, and {len(fitting)} of them with --disaggregation-mode "
            f"{role.value}; one is needed"
        )
    return fitting[0]


def _one_of_nodes(read: list[tuple[Command, Flags]]) -> list[tuple[Command, Flags]]:
    """Of commands that are one engine's on several nodes, alike but for their node's own settings, the first."""

    def same(c: Command, f: Flags) -> tuple[object, ...]:
        values = {(d, repr(v)) for d, v in f.values.items() if is_read(d) and d != "host"}
        return frozenset(values), frozenset(f.hidden) - {"node_rank", "host"}, frozenset(f.problems)

    several = all(f.given("nnodes") and f.values.get("nnodes") != 1 for _, f in read)
    return read[:1] if several and len({same(c, f) for c, f in read}) == 1 else read


def _label(name: str) -> str:
    return BY_DEST[name].name if name in BY_DEST else name


def _unknown(role: Role, command: Command, flags: Flags) -> tuple[str, ...]:
    """Settings and variables whose value only a shell knows. Raises Unreadable where nothing could be said then."""
    stray = next((w for w in command.shell_only if any(repr(w) in p for p in flags.problems)), None)
    if stray is not None:
        raise Unreadable(
            f"{role.value}'s command line can not be read: only its shell knows what {stray} is, and it may hold more "
            "flags: write them out"
        )
    names = [d for d in flags.hidden if is_read(d)]
    for name in names:
        if not hidden_fact(role, name):
            raise Unreadable(
                f"{role.value}'s command line can not be read: only its shell knows the value of {_label(name)}: "
                "put it into the command line"
            )
    names += [n for n, v in command.environment.items() if has_variable(v) and hidden_fact(role, n)]
    return tuple(names)


def _geometry(flags: Flags, options: CommandOptions) -> ModelGeometry | None:
    overrides = flags.values.get("json_model_override_args")
    return model_geometry(options.model_config, flags.values.get("model_path"), overrides)


def check_commands(
    prefill: str,
    decodes: Sequence[str],
    options: CommandOptions,
    stated: Stated,
    *,
    prefill_gpu: Accelerator | None = None,
    decode_gpu: Accelerator | None = None,
) -> list[Outside]:
    """Whether prefill fits each decode group. Raises Unreadable naming the side."""
    side = read_side(Role.PREFILL, prefill, prefill_gpu, options)
    return check_group(side, [read_side(Role.DECODE, text, decode_gpu, options) for text in decodes], stated)
