"""The snapshot and group-snapshot kinds, there from the start as CustomResourceDefinitions.

Owns: their definitions, written here; a cluster's owner may apply newer ones on top.
May not touch: storage.
Start reading at: `snapshot_definitions`.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}
COUNT: Schema = {"type": "integer", "format": "int64"}
TEXTS: Schema = {"type": "array", "items": TEXT}
POLICY: Schema = {"type": "string", "enum": ["Delete", "Retain"]}
PARAMETERS: Schema = {"type": "object", "additionalProperties": TEXT}
ERROR: Schema = {"type": "object", "properties": {"message": TEXT, "time": TIME}}
QUANTITY: Schema = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
}
SELECTOR: Schema = {
    "type": "object",
    "x-kubernetes-map-type": "atomic",
    "properties": {
        "matchLabels": PARAMETERS,
        "matchExpressions": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["key", "operator"],
                "properties": {"key": TEXT, "operator": TEXT, "values": TEXTS},
            },
        },
    },
}


def _object(needed: str = "", rules: list[tuple[str, str]] | None = None, **properties: Schema) -> Schema:
    made: Schema = {"type": "object", "properties": properties}
    if needed:
        made["required"] = needed.split()
    if rules:
        made["x-kubernetes-validations"] = [{"rule": rule, "message": message} for rule, message in rules]
    return made


def _fixed(schema: Schema, name: str) -> Schema:
    """A field that may not change once it is there."""
    rule = {"rule": "self == oldSelf", "message": f"{name} is immutable once set"}
    return {**schema, "x-kubernetes-validations": [rule]}


def _not_empty(name: str) -> Schema:
    rule = {"rule": "size(self) > 0", "message": f"{name} must not be the empty string when it is set"}
    return {**TEXT, "x-kubernetes-validations": [rule]}


def _either(one: str, other: str, **properties: Schema) -> Schema:
    """Exactly one of two fields, which then stays."""
    rules = [
        (f"!has(oldSelf.{one}) || has(self.{one})", f"{one} is required once set"),
        (f"!has(oldSelf.{other}) || has(self.{other})", f"{other} is required once set"),
        (
            f"(has(self.{one}) && !has(self.{other})) || (!has(self.{one}) && has(self.{other}))",
            f"exactly one of {one} and {other} must be set",
        ),
    ]
    return _object("", rules, **{name: _fixed(schema, name) for name, schema in properties.items()})


def _reference(name: str) -> Schema:
    fields = ("apiVersion", "fieldPath", "kind", "name", "namespace", "resourceVersion", "uid")
    rule = ("has(self.name) && has(self.__namespace__)", f"both {name}.name and {name}.namespace must be set")
    made = _object("", [rule], **{field: TEXT for field in fields})
    return {**made, "x-kubernetes-map-type": "atomic"}


def _columns(*pairs: str) -> list[Schema]:
    """`Name:type:path` triples; a leading minus makes the column wide."""
    made = []
    for pair in (*pairs, "Age:date:.metadata.creationTimestamp"):
        name, kind, path = pair.lstrip("-").split(":")
        column: Schema = {"name": name, "type": kind, "jsonPath": path}
        if pair.startswith("-"):
            column["priority"] = 1
        made.append(column)
    return made


def _definition(
    kind: str, plural: str, short: str, scope: str, group: str, versions: list[str], body: Schema, columns: list[Schema]
) -> Schema:
    has_status = "status" in body["properties"]
    schema = {
        **body,
        "properties": {"apiVersion": TEXT, "kind": TEXT, "metadata": {"type": "object"}, **body["properties"]},
    }
    made = [
        {
            "name": version,
            "served": True,
            "storage": at == 0,
            "schema": {"openAPIV3Schema": schema},
            "additionalPrinterColumns": columns,
            **({"subresources": {"status": {}}} if has_status else {}),
        }
        for at, version in enumerate(versions)
    ]
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List",
             "shortNames": short.split()}  # fmt: skip
    return {
        "kind": "CustomResourceDefinition",
        "apiVersion": "apiextensions.k8s.io/v1",
        "metadata": {"name": f"{plural}.{group}", "annotations": {"api-approved.kubernetes.io": "built in"}},
        "spec": {"group": group, "scope": scope, "names": names, "versions": made},
    }


def _snapshots() -> list[Schema]:
    group, versions = "snapshot.storage.k8s.io", ["v1"]
    source = _either(
        "volumeSnapshotContentName", "persistentVolumeClaimName",
        volumeSnapshotContentName=TEXT, persistentVolumeClaimName=TEXT,
    )  # fmt: skip
    snapshot = _object(
        "spec",
        spec=_object("source", source=source, volumeSnapshotClassName=_not_empty("volumeSnapshotClassName")),
        status=_object(
            boundVolumeSnapshotContentName=TEXT, creationTime=TIME, readyToUse=FLAG, restoreSize=QUANTITY,
            error=ERROR, volumeGroupSnapshotName=TEXT,
        ),
    )  # fmt: skip
    handles = _either("volumeHandle", "snapshotHandle", volumeHandle=TEXT, snapshotHandle=TEXT)
    content_spec = _object(
        "deletionPolicy driver source volumeSnapshotRef",
        [("!has(oldSelf.sourceVolumeMode) || has(self.sourceVolumeMode)", "sourceVolumeMode is required once set")],
        deletionPolicy=POLICY, driver=TEXT, source=handles, sourceVolumeMode=_fixed(TEXT, "sourceVolumeMode"),
        volumeSnapshotClassName=TEXT, volumeSnapshotRef=_reference("spec.volumeSnapshotRef"),
    )  # fmt: skip
    content = _object(
        "spec",
        spec=content_spec,
        status=_object(
            creationTime=COUNT, readyToUse=FLAG, restoreSize={**COUNT, "minimum": 0}, snapshotHandle=TEXT,
            error=ERROR, volumeGroupSnapshotHandle=TEXT,
        ),
    )  # fmt: skip
    made_class = _object("deletionPolicy driver", deletionPolicy=POLICY, driver=TEXT, parameters=PARAMETERS)
    return [
        _definition("VolumeSnapshot", "volumesnapshots", "vs", "Namespaced", group, versions, snapshot, _columns(
            "ReadyToUse:boolean:.status.readyToUse", "SourcePVC:string:.spec.source.persistentVolumeClaimName",
            "SourceSnapshotContent:string:.spec.source.volumeSnapshotContentName",
            "RestoreSize:string:.status.restoreSize", "SnapshotClass:string:.spec.volumeSnapshotClassName",
            "SnapshotContent:string:.status.boundVolumeSnapshotContentName",
            "CreationTime:date:.status.creationTime")),
        _definition("VolumeSnapshotContent", "volumesnapshotcontents", "vsc vscs", "Cluster", group, versions, content,
            _columns("ReadyToUse:boolean:.status.readyToUse", "RestoreSize:integer:.status.restoreSize",
                "DeletionPolicy:string:.spec.deletionPolicy", "Driver:string:.spec.driver",
                "VolumeSnapshotClass:string:.spec.volumeSnapshotClassName",
                "VolumeSnapshot:string:.spec.volumeSnapshotRef.name",
                "VolumeSnapshotNamespace:string:.spec.volumeSnapshotRef.namespace")),
        _definition("VolumeSnapshotClass", "volumesnapshotclasses", "vsclass vsclasses", "Cluster", group, versions,
            made_class, _columns("Driver:string:.driver", "DeletionPolicy:string:.deletionPolicy")),
    ]  # fmt: skip


def _group_snapshots() -> list[Schema]:
    group, versions = "groupsnapshot.storage.k8s.io", ["v1beta2", "v1beta1", "v1"]
    source = _either(
        "selector", "volumeGroupSnapshotContentName", selector=SELECTOR, volumeGroupSnapshotContentName=TEXT
    )  # fmt: skip
    snapshot = _object(
        "spec",
        spec=_object("source", source=source, volumeGroupSnapshotClassName=_not_empty("volumeGroupSnapshotClassName")),
        status=_object(
            boundVolumeGroupSnapshotContentName=TEXT, creationTime=TIME, readyToUse=FLAG, error=ERROR,
        ),
    )  # fmt: skip
    handles = _either(
        "volumeHandles", "groupSnapshotHandles", volumeHandles=TEXTS,
        groupSnapshotHandles=_object("volumeGroupSnapshotHandle volumeSnapshotHandles",
                                     volumeGroupSnapshotHandle=TEXT, volumeSnapshotHandles=TEXTS),
    )  # fmt: skip
    pairs = {"type": "array", "items": _object("snapshotHandle volumeHandle", snapshotHandle=TEXT, volumeHandle=TEXT)}
    infos = {"type": "array", "items": _object(
        creationTime=COUNT, readyToUse=FLAG, restoreSize=COUNT, snapshotHandle=TEXT, volumeHandle=TEXT)}  # fmt: skip
    content = _object(
        "spec",
        spec=_object(
            "deletionPolicy driver source volumeGroupSnapshotRef",
            deletionPolicy=POLICY, driver=_fixed(TEXT, "driver"), source=handles,
            volumeGroupSnapshotClassName=TEXT, volumeGroupSnapshotRef=_reference("spec.volumeGroupSnapshotRef"),
        ),
        status=_object(
            creationTime=TIME, readyToUse=FLAG, error=ERROR, volumeGroupSnapshotHandle=TEXT,
            volumeSnapshotHandlePairList=pairs, volumeSnapshotInfoList=infos,
        ),
    )  # fmt: skip
    made_class = _object("deletionPolicy driver", deletionPolicy=POLICY, driver=TEXT, parameters=PARAMETERS)
    return [
        _definition("VolumeGroupSnapshot", "volumegroupsnapshots", "vgs", "Namespaced", group, versions, snapshot,
            _columns("ReadyToUse:boolean:.status.readyToUse",
                "VolumeGroupSnapshotClass:string:.spec.volumeGroupSnapshotClassName",
                "VolumeGroupSnapshotContent:string:.status.boundVolumeGroupSnapshotContentName",
                "CreationTime:date:.status.creationTime")),
        _definition("VolumeGroupSnapshotContent", "volumegroupsnapshotcontents", "vgsc vgscs", "Cluster", group,
            versions, content, _columns("ReadyToUse:boolean:.status.readyToUse",
                "DeletionPolicy:string:.spec.deletionPolicy", "Driver:string:.spec.driver",
                "VolumeGroupSnapshotClass:string:.spec.volumeGroupSnapshotClassName",
                "VolumeGroupSnapshotNamespace:string:.spec.volumeGroupSnapshotRef.namespace",
                "VolumeGroupSnapshot:string:.spec.volumeGroupSnapshotRef.name")),
        _definition("VolumeGroupSnapshotClass", "volumegroupsnapshotclasses", "vgsclass vgsclasses", "Cluster", group,
            versions, made_class, _columns("Driver:string:.driver", "DeletionPolicy:string:.deletionPolicy")),
    ]  # fmt: skip


def snapshot_definitions() -> list[Schema]:
    """Six definitions: snapshots, contents and classes, single and in groups."""
    return _snapshots() + _group_snapshots()
