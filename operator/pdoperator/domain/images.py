"""What running ranks told about the engine image of a spec: a spec that is not launched yet can be held to it."""

from __future__ import annotations

from collections.abc import Iterator

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.observed import Observed
from pdoperator.domain.revision import role_revisions
from pdtransfer.contract.compat.nixl import IN_EVERY_WHEEL


def plugins_seen(observed: Observed) -> frozenset[str] | None:
    """The plugins that NIXL finds in the image of this spec's engine, as ranks told that run it, be it with an older
    spec. None where no rank told, and where nothing but UCX is asked for. A tag counts as one image."""
    spec = observed.cluster.spec
    if spec is None or spec.transfer.plugin.name == IN_EVERY_WHEEL:
        return None
    revisions = {
        revision
        for known in (spec, *_stored(observed))
        if known.engine.image == spec.engine.image
        for revision in role_revisions(known).values()
    }
    for pod in observed.pods:
        answer = observed.answers.get(pod.uid)
        if pod.revision not in revisions or answer is None or answer.cards is None:
            continue
        told = next((c.engine.nixl_plugins for c in answer.cards.cards if c.engine.nixl_plugins), ())
        if told:
            return frozenset(told)
    return None


def _stored(observed: Observed) -> Iterator[PDClusterSpec]:
    for stored in observed.stored or ():
        try:
            yield PDClusterSpec.model_validate(stored.raw)
        except ValueError:
            continue  # another operator's, and nothing that runs now
