"""Family D: layers that hold state instead of paged KV (sliding window, Mamba, linear attention)."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.parallelism import geometry_of, sizes
from pdtransfer.contract.compat.rule import Family, Hit, Outcome, attention_tp, columns, every
from pdtransfer.contract.facts import RoleFacts

D = Family()


@D.rule(
    "D1",
    "Recurrent state (Mamba, linear attention)",
    columns(Outcome.REQ, Outcome.WARN, Outcome.WARN),
    needs=("geometry", "tensor_parallel"),
    change="use transfer.backend NIXL or Mooncake, at equal TP",
)
def d1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    linear = geometry_of(p, d).linear_layers
    if not linear:
        return None
    if backend is Backend.PDCLUSTER:
        return Hit(
            f"{len(linear)} of {geometry_of(p, d).layers} layers keep recurrent state (Mamba or linear "
            "attention), which PDCluster's mover does not do yet",
            consequence="Decode would continue from a state it never got; the pair is refused.",
        )
    if attention_tp(p) == attention_tp(d):
        return None
    return Hit(
        f"{sizes(p, d)}, and {len(linear)} layers keep recurrent state",
        change="use equal TP",
        consequence="The state is sliced; tensors that every TP rank repeats make requests fail.",
    )


@D.rule(
    "D2",
    "Sliding-window layers at unequal TP",
    every(Outcome.HANG),
    needs=("geometry", "tensor_parallel"),
    change="use equal TP on both roles",
)
def d2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if attention_tp(p) == attention_tp(d):
        return None
    geometry = geometry_of(p, d)
    if geometry.latent or not geometry.sliding_window_layers:
        return None
    return Hit(
        f"{sizes(p, d)}, and {len(geometry.sliding_window_layers)} of {geometry.layers} layers keep a sliding "
        "window, which is sent as state",
        outcome=Outcome.REQ if backend is Backend.PDCLUSTER else None,
        consequence="PDCluster's mover does not slice state windows yet; the pair is refused."
        if backend is Backend.PDCLUSTER
        else "The first request fails or hangs; both servers stay healthy.",
    )


@D.rule(
    "D5",
    "Recurrent state has one dtype",
    columns(nixl=Outcome.REQ, mooncake=Outcome.WRONG),
    needs=("geometry", "ssm_dtype"),
    change="set --mamba-ssm-dtype alike on both roles",
)
def d5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.ssm_dtype == d.ssm_dtype or not geometry_of(p, d).linear_layers:
        return None
    return Hit(
        f"recurrent state is {p.ssm_dtype or 'the default dtype'} on prefill and "
        f"{d.ssm_dtype or 'the default dtype'} on decode"
    )
