"""The last specs that fit, kept as ControllerRevisions: what runs is healed from the newest of them while
the PDCluster's own spec can not be read or does not fit.

Their data is immutable in the API, so each is named by a hash of its spec; a spec that comes back gets
the highest number again.
"""

from __future__ import annotations

from typing import Any

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.actions import Action, Apply, Delete
from pdoperator.domain.observed import ClusterObject, Observed, StoredSpec
from pdoperator.domain.pods import child_labels, owner_reference, short_name
from pdtransfer.contract.base import content_hash

API, KIND = "apps/v1", "ControllerRevision"
KEPT = 5
"""How many are kept, the newest first."""


def last_fitting(observed: Observed) -> PDClusterSpec | None:
    """The newest kept spec that this operator can read; None where there is none."""
    for stored in sorted(observed.stored or (), key=lambda s: -s.number):
        try:
            return PDClusterSpec.model_validate(stored.raw)
        except ValueError:
            continue
    return None


def _name(cluster: ClusterObject) -> str:
    return short_name(cluster.name, content_hash(cluster.raw_spec)[:10])


def _manifest(cluster: ClusterObject, number: int) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": KIND,
        "metadata": {
            "name": _name(cluster),
            "namespace": cluster.namespace,
            "labels": child_labels(cluster),
            "ownerReferences": [owner_reference(cluster)],
        },
        "data": {"spec": cluster.raw_spec},
        "revision": number,
    }


def keep(observed: Observed) -> list[Action]:
    """Keep the spec of this look, which fits, as the newest one, and let the oldest go."""
    cluster = observed.cluster
    if observed.stored is None:
        return []
    by_age = sorted(observed.stored, key=lambda s: -s.number)
    name = _name(cluster)
    if by_age and by_age[0].name == name:
        return _beyond(by_age)
    number = by_age[0].number + 1 if by_age else 1
    rest = [s for s in by_age if s.name != name]
    return [Apply(_manifest(cluster, number)), *_beyond([StoredSpec(name, number, {}), *rest])]


def _beyond(by_age: list[StoredSpec]) -> list[Action]:
    return [Delete(API, KIND, s.name) for s in by_age[KEPT:]]
