"""The pieces of Kubernetes' own types that a PDCluster's spec carries, as structural schemas.

Small ones are spelled out, so that a typo in them is refused like one of ours. Big ones (a volume's
source, affinity) keep unknown fields on that sub-object only: the composed pod goes through a strict
server-side dry run before it is created, which is where their typos show. In Python all of them are
plain dicts in Kubernetes' own spelling, checked against the same schema by `structural.problems`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from pdoperator.api.structural import problems

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "maxLength": 1024}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 253}
INT_OR_STRING: Schema = {"x-kubernetes-int-or-string": True}
ANY_OBJECT: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
# The pattern of resource.Quantity, as in Kubernetes' own generated CRDs.
QUANTITY_PATTERN = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
QUANTITY: Schema = {"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "maxLength": 64}
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY, "maxProperties": 64}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    return schema


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


RESOURCES = _object(
    limits=_described(QUANTITIES, "Upper bounds by resource name, for example nvidia.com/gpu or memory."),
    requests=_described(QUANTITIES, "Guaranteed amounts by resource name."),
    claims={
        "type": "array",
        "maxItems": 32,
        "description": "Names of the pod's resource claims that the engine container uses.",
        "items": _object(("name",), name=NAME, request=STRING),
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
    },
)

_KEY_REF = _object(("key",), name=NAME, key=NAME, optional={"type": "boolean"})
ENV_SOURCE = _object(
    configMapKeyRef=_described(_KEY_REF, "A key of a ConfigMap in the PDCluster's namespace."),
    secretKeyRef=_described(_KEY_REF, "A key of a Secret in the PDCluster's namespace."),
    fieldRef=_object(("fieldPath",), apiVersion=STRING, fieldPath=STRING),
    resourceFieldRef=_object(("resource",), containerName=NAME, resource=NAME, divisor=QUANTITY),
    fileKeyRef=_object(
        ("volumeName", "path", "key"), volumeName=NAME, path=STRING, key=NAME, optional={"type": "boolean"}
    ),
)
ENV_SOURCE |= {"minProperties": 1, "maxProperties": 1}

VOLUME_SOURCE: Schema = {
    **ANY_OBJECT,
    "minProperties": 1,
    "maxProperties": 1,
}
VOLUME: Schema = {
    **_object(("name",), name={**NAME, "maxLength": 63}),
    "x-kubernetes-preserve-unknown-fields": True,
    "minProperties": 2,
    "maxProperties": 2,
}
VOLUME_MOUNT = _object(
    ("name", "mountPath"),
    name={**NAME, "maxLength": 63},
    mountPath={**STRING, "minLength": 1},
    subPath=STRING,
    subPathExpr=STRING,
    readOnly={"type": "boolean"},
    recursiveReadOnly=STRING,
    mountPropagation={"type": "string", "enum": ["None", "HostToContainer", "Bidirectional"]},
)
TOLERATION = _object(
    key=STRING,
    operator={"type": "string", "enum": ["Exists", "Equal", "Lt", "Gt"]},
    value=STRING,
    effect={"type": "string", "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
    tolerationSeconds={"type": "integer", "format": "int64"},
)
PULL_SECRET = _object(("name",), name=NAME)


def _checked(schema: Schema) -> AfterValidator:
    def check(value: Any) -> Any:
        found = problems(value, schema) if value is not None else []
        if found:
            raise ValueError("; ".join(found))
        return value

    return AfterValidator(check)


def _kube(schema: Schema) -> Any:
    """Annotation of a dict field that carries `schema` in the CRD and is checked against it here."""
    return Annotated[dict[str, Any], _checked(schema), Field(json_schema_extra={"x-pd-schema": schema})]


ResourceRequirements = _kube(RESOURCES)
EnvVarSource = _kube(ENV_SOURCE)
VolumeSource = _kube(VOLUME_SOURCE)
Volume = _kube(VOLUME)
VolumeMount = _kube(VOLUME_MOUNT)
Toleration = _kube(TOLERATION)
PullSecret = _kube(PULL_SECRET)
AnyObject = _kube(ANY_OBJECT)
