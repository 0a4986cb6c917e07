"""What prefill's bootstrap server says of its ranks, and how decode asks for it.

`GET /pdcluster/ranks` answers a `Registry`; `/health` carries the incarnation in a header, so that a prefill that
came back at once under the same address is told from the one before.
"""

from __future__ import annotations

import http.client
from contextlib import closing

from pydantic import Field, ValidationError

from pdtransfer.contract.base import ContractModel
from pdtransfer.contract.card import RankCard

PATH = "/pdcluster/ranks"
HEADER = "X-PDCluster-Incarnation"
FIELD = "pdcluster"
"""Where a rank's registration (PUT /route) carries what is ours."""
MAX_ANSWER = 256 << 20


class RegisteredRank(ContractModel):
    """One prefill rank: where SGLang's messages reach it, and its card."""

    ip: str
    port: int = Field(gt=0, lt=1 << 16)
    card: RankCard


class Registry(ContractModel):
    """All prefill ranks that registered so far; `complete` once every rank has."""

    version: int = 1
    complete: bool
    ranks: tuple[RegisteredRank, ...] = ()

    def at(self, dp: int, cp: int, tp: int, pp: int) -> RegisteredRank | None:
        """The rank in that place."""
        for rank in self.ranks:
            held = rank.card.layout.coordinates
            if (held.dp, held.cp, held.tp, held.pp) == (dp, cp, tp, pp):
                return rank
        return None


class NotReachable(Exception):
    """Nobody answers there, or not all ranks have registered: worth another try."""


class NotOurs(Exception):
    """Something answers there that is no prefill with this backend: trying again would not help."""


def fetch(address: str, timeout: float) -> Registry:
    """The registry at host:port. Raises NotReachable or NotOurs."""
    status, data, _ = _get(address, PATH, timeout)
    if status == 404:
        raise NotOurs(
            f"the bootstrap server at {address} is not pdcluster's: prefill runs another transfer backend "
            "(set --disaggregation-transfer-backend pdcluster on both sides)"
        )
    if status != 200:
        raise NotReachable(f"the bootstrap server at {address} answers HTTP {status}")
    try:
        registry = Registry.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise NotOurs(f"the bootstrap server at {address} sent no registry: {where}: {first['msg']}") from None
    if not registry.complete:
        raise NotReachable(f"{len(registry.ranks)} prefill ranks have registered at {address} so far")
    broken = next((f"rank {r.card.rank}: {r.card.seal_broken}" for r in registry.ranks if r.card.seal_broken), None)
    if broken is not None:
        raise NotOurs(f"a card at {address} is broken: {broken}")
    return registry


def incarnation_at(address: str, timeout: float) -> str:
    """Which incarnation answers /health there; empty when it does not say. Raises NotReachable."""
    status, _, header = _get(address, "/health", timeout)
    if status != 200:
        raise NotReachable(f"the bootstrap server at {address} answers HTTP {status}")
    return header


def _get(address: str, path: str, timeout: float) -> tuple[int, bytes, str]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise NotOurs(f"{address!r} is no address of a bootstrap server")
    try:
        with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            data = answer.read(MAX_ANSWER)
            return answer.status, data, answer.getheader(HEADER) or ""
    except (OSError, http.client.HTTPException) as error:
        raise NotReachable(f"no prefill answers at {address}: {type(error).__name__}: {error}") from None
