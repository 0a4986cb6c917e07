"""Events, emitted on change only: what the conditions did since the last status, and what is being done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdoperator.api.conditions import ConditionStatus, ConditionType, Reason
from pdoperator.domain import incarnations
from pdoperator.domain.actions import DeletePod, EmitEvent
from pdoperator.domain.condition import Aspect, old_condition
from pdoperator.domain.picture import Picture
from pdoperator.domain.view import engine_pods
from pdoperator.domain.words import count


def events(
    pic: Picture,
    aspects: list[Aspect],
    before: Mapping[str, Any],
    drained: Sequence[DeletePod],
) -> list[EmitEvent]:
    """`before` is the status as it is written, `drained` are the pods that go as planned. An operator that dies between
    an event and the status tells the event again, which is the same Event object."""
    out: list[EmitEvent] = []

    def turned(kind: ConditionType, status: ConditionStatus) -> Aspect | None:
        now = next((a for a in aspects if a.type is kind), None)
        if now is None or now.status is not status:
            return None
        was = old_condition(before, kind)
        if was.get("status") == status.value and was.get("reason") == now.reason.value:
            return None
        return now

    refused = turned(ConditionType.COMPATIBLE, ConditionStatus.FALSE)
    if refused:
        out.append(EmitEvent("Warning", Reason.REFUSED.value, refused.message[:1000]))
    if pic.plan.creates:
        made = ", ".join(c.manifest["metadata"]["name"] for c in pic.plan.creates[:5])
        out.append(
            EmitEvent("Normal", Reason.LAUNCHED.value, f"launching {count(len(pic.plan.creates), 'pod')}: {made}")
        )
    for kind, deletes in (("Warning", pic.plan.deletes), ("Normal", drained)):
        out += [EmitEvent(kind, d.reason, f"{d.name}: {d.message}") for d in deletes]
    named = {p.uid: p.name for p in engine_pods(pic.observed)}
    known = incarnations.told(before)
    for uid, new in incarnations.seen(pic).items():
        old = known.get(uid, new)
        if old != new:
            out.append(
                EmitEvent(
                    "Normal",
                    Reason.PEER_REPLACED.value,
                    f"{named.get(uid, uid)} started again (incarnation {old} is now {new}); its peers are wired to the "
                    "new one",
                )
            )
    for kind in (ConditionType.PREFILL_READY, ConditionType.DECODE_READY):
        lost = turned(kind, ConditionStatus.FALSE)
        if lost and lost.reason in (Reason.RANK_LOST, Reason.RANK_FAILED):
            out.append(EmitEvent("Warning", lost.reason.value, lost.message[:1000]))
    wired = turned(ConditionType.PEERS_WIRED, ConditionStatus.TRUE)
    if wired:
        out.append(EmitEvent("Normal", Reason.WIRED.value, wired.message))
    failed = turned(ConditionType.KV_TRANSFER_VERIFIED, ConditionStatus.FALSE)
    if failed:
        out.append(EmitEvent("Warning", Reason.VERIFICATION_FAILED.value, failed.message))
    return out
