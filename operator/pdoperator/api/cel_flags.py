"""Regular expressions (RE2) for the spellings of operator-owned engine flags, for the CRD's CEL rules.

`domain.engine_flags` decides; these patterns say the same to the API server and are tested against it.
"""

from __future__ import annotations

from pdoperator.domain.engine_flags import OWNED, OwnedFlag, another_flag

_PATTERN_BUDGET = 500
"""Characters of a pattern on extraArgs. The API server estimates a rule's cost as items x length of the argument x
length of the pattern, and refused 921 characters by a factor of 1.2."""


def _dashes(name: str) -> str:
    """Regular expression for a flag's name, in which inner dashes may be underscores."""
    return "--" + name[2:].replace("-", "[-_]")


def flag_pattern(flag: OwnedFlag) -> str:
    """RE2 for every full spelling of an owned flag, with or without =value."""
    words = [_dashes(name) for name in flag.names]
    return f"^({'|'.join(words)})([= ].*)?$"


def abbreviation_patterns() -> tuple[str, ...]:
    """RE2 for every proper prefix of an owned long flag that is not a flag of its own: what argparse may take
    as an abbreviation. Tries over the names keep them short; each stays within the cost of one rule."""
    owned = {name for flag in OWNED for name in flag.names}

    def branches(prefix: str) -> list[str]:
        letters = sorted({name[len(prefix)] for name in owned if name.startswith(prefix) and name != prefix})
        found = []
        for letter in letters:
            rest = "|".join(branches(prefix + letter))
            accepted = prefix + letter not in owned and not another_flag(prefix + letter)
            if not rest and not accepted:
                continue
            shown = "[-_]" if letter == "-" else letter
            found.append(shown + (f"({rest})?" if rest and accepted else f"({rest})" if rest else ""))
        return found

    groups: list[str] = []
    for trie in branches("--"):
        if groups and len(groups[-1]) + len(trie) < _PATTERN_BUDGET:
            groups[-1] += "|" + trie
        else:
            groups.append(trie)
    return tuple(f"^--({each})([= ].*)?$" for each in groups)
