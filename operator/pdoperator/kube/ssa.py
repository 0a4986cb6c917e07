"""The part of server-side apply that the fake API server needs, as pure functions.

Ownership is kept as each manager's last applied manifest: fields it applied before and leaves out
now are removed, everything else is merged. Lists of maps merge by key (conditions by `type`,
containers, volumes, env and ports by `name`), all other lists are atomic.
"""

from __future__ import annotations

from typing import Any

_KEYS = ("type", "name", "containerPort", "port")


def _list_key(*lists: list[Any]) -> str | None:
    items = [i for one in lists for i in one]
    if not items or not all(isinstance(i, dict) for i in items):
        return None
    return next((k for k in _KEYS if all(k in i for i in items)), None)


def merge(live: Any, wanted: Any, previous: Any) -> Any:
    """`live` after a manager that applied `previous` before applies `wanted` now."""
    if isinstance(live, dict) and isinstance(wanted, dict):
        before = previous if isinstance(previous, dict) else {}
        result = {k: v for k, v in live.items() if k in wanted or k not in before}
        for key, value in wanted.items():
            result[key] = merge(live.get(key), value, before.get(key)) if key in live else value
        return result
    if isinstance(live, list) and isinstance(wanted, list):
        key = _list_key(live, wanted)
        if key is None:
            return wanted
        old = {i[key]: i for i in previous if isinstance(i, dict)} if isinstance(previous, list) else {}
        new = {i[key]: i for i in wanted}
        kept = [merge(i, new[i[key]], old.get(i[key])) if i[key] in new else i
                for i in live if i[key] in new or i[key] not in old]  # fmt: skip
        present = {i[key] for i in live}
        return kept + [i for i in wanted if i[key] not in present]
    return wanted
