"""Events have two faces: the core one and that of events.k8s.io, on one store.

Owns: turning one into the other.
May not touch: storage. The core form is the stored one.
Start reading at: `newer_kind`.
"""

from moorage.apiserver.kinds.registry import Kind, Object
from moorage.apiserver.kinds.schema import struct

_NAMES = (  # core, events.k8s.io
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
)
_TO_NEW = dict(_NAMES)
_TO_CORE = {new: core for core, new in _NAMES}


def to_core(event: Object) -> Object:
    found = {_TO_CORE.get(key, key): value for key, value in event.items()}
    return {**found, "kind": "Event", "apiVersion": "v1"}


def to_new(event: Object) -> Object:
    found = {_TO_NEW.get(key, key): value for key, value in event.items()}
    found.setdefault("eventTime", None)
    return {**found, "kind": "Event", "apiVersion": "events.k8s.io/v1"}


def newer_kind(core: Kind) -> Kind:
    """The kind of events.k8s.io, stored with the core events."""
    return Kind(
        group="events.k8s.io",
        version="v1",
        name="Event",
        plural="events",
        type=struct("events.v1.Event"),
        is_namespaced=True,
        short_names=("ev",),
        creates_on_update=True,
        selectable=(*core.selectable, "regarding.kind", "regarding.name", "regarding.namespace", "regarding.uid"),
        stored_as=core.stored_as,
        decode_from=to_core,
        encode_to=to_new,
    )
