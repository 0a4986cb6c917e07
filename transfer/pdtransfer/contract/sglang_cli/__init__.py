"""Facts about plain SGLang servers, without SGLang: from a command line, or from what a running server says.

    command = read_command("SGLANG_HOST_IP=10.0.0.1 python -m sglang.launch_server --model-path m --tp 4")
    flags = read_flags(with_config(command.arguments, read_yaml))
    command_facts(Role.PREFILL, flags, command.environment)      # facts, and what could not be used
    server_facts(body_of_server_info)

Names, kinds, defaults and choices of the flags are those of SGLang 0.5.23 (`flags.py`, `other_flags.py`); a test holds
them to its own parser.
"""

from pdtransfer.contract.sglang_cli.command import (
    Command,
    CommandUnreadable,
    exec_command,
    has_reference,
    has_variable,
    read_command,
    read_commands,
    with_config,
)
from pdtransfer.contract.sglang_cli.config_file import ConfigRefused
from pdtransfer.contract.sglang_cli.facts import (
    BACKENDS,
    VARIABLE_OF,
    ReadFacts,
    command_facts,
    given_facts,
    hidden_fact,
    named_role,
    told_settings,
)
from pdtransfer.contract.sglang_cli.flags import BY_DEST, READ_FROM, Flag, is_read
from pdtransfer.contract.sglang_cli.parser import Flags, is_flag, meant, read_flags
from pdtransfer.contract.sglang_cli.server import (
    NoServerInfo,
    PrefillRoute,
    card_facts,
    prefill_route,
    route_contradictions,
    server_facts,
)

__all__ = [
    "BACKENDS",
    "BY_DEST",
    "READ_FROM",
    "VARIABLE_OF",
    "Command",
    "CommandUnreadable",
    "ConfigRefused",
    "Flag",
    "Flags",
    "NoServerInfo",
    "PrefillRoute",
    "ReadFacts",
    "card_facts",
    "command_facts",
    "exec_command",
    "given_facts",
    "has_reference",
    "has_variable",
    "hidden_fact",
    "is_flag",
    "is_read",
    "meant",
    "named_role",
    "prefill_route",
    "read_command",
    "read_commands",
    "read_flags",
    "route_contradictions",
    "server_facts",
    "told_settings",
    "with_config",
]
