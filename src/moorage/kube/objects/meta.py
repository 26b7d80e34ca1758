"""What all Kubernetes objects share: metadata, references, selectors, and where a kind is served.

Owns: the base class of typed objects and `Resource`, the address of a kind.
May not touch: HTTP, stores. A struct holds only the fields that Moorage's parts read; a part that reads fewer may
declare a narrower class with the same `resource`.
"""

import functools
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from moorage.kube.errors import BadRequest


class Struct(msgspec.Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A frozen piece of an object, camelCase on the wire; unknown fields are ignored when read."""


class Resource(msgspec.Struct, frozen=True):
    """Where a kind is served."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """The URL path; without a namespace, a namespaced kind is addressed in all of them."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "".join(f"/{_segment(part)}" for part in parts)

    def split(self, key: str) -> tuple[str, str]:
        """The namespace and the name in a key."""
        namespace, slash, name = key.partition("/")
        return (namespace, name) if self.namespaced and slash else ("", key)


def _segment(part: str) -> str:
    """One part of a path. API servers take any text where one object names another, also `../../other/secrets/s`: what
    is no name must not lead elsewhere. `%2e%2e` would do so, too, since URLs are normalised on their way."""
    if part in (".", "..") or "/" in part or "%" in part:
        raise BadRequest(400, "BadRequest", f"{part[:253]!r} is no name: it may not be . or .., nor contain / or %")
    return quote(part, safe=":@")


class OwnerReference(Struct, frozen=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False
    block_owner_deletion: bool = False


class Meta(Struct, frozen=True):
    """Object metadata, without managedFields."""

    name: str = ""
    namespace: str = ""
    generate_name: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: list[str] = []
    owner_references: list[OwnerReference] = []


class KubeObject(Struct, frozen=True):
    """An object of the API: `resource` says where its kind lives."""

    resource: ClassVar[Resource]

    metadata: Meta = Meta()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def key(self) -> str:
        """`namespace/name`, or the name alone for cluster-wide kinds."""
        return f"{self.metadata.namespace}/{self.metadata.name}" if self.metadata.namespace else self.metadata.name

    @property
    def version(self) -> int:
        """The resourceVersion as the number that it is."""
        return version_number(self.metadata.resource_version)

    @property
    def is_deleting(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def annotations(self) -> dict[str, str]:
        return self.metadata.annotations

    @property
    def labels(self) -> dict[str, str]:
        return self.metadata.labels

    @property
    def finalizers(self) -> list[str]:
        return self.metadata.finalizers


class LocalReference(Struct, frozen=True):
    name: str = ""


class TypedReference(Struct, frozen=True):
    """A dataSource or dataSourceRef: an object by group, kind and name."""

    api_group: str | None = None
    kind: str = ""
    name: str = ""
    namespace: str | None = None


class ObjectReference(Struct, frozen=True):
    """A full reference, such as a volume's claimRef or an event's subject."""

    api_version: str = ""
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    field_path: str = ""


class SecretReference(Struct, frozen=True):
    name: str = ""
    namespace: str = ""


class Requirement(Struct, frozen=True):
    """One expression of a label selector or a node term."""

    key: str = ""
    operator: str = ""
    values: list[str] = []


class LabelSelector(Struct, frozen=True):
    match_labels: dict[str, str] = {}
    match_expressions: list[Requirement] = []


class NodeSelectorTerm(Struct, frozen=True):
    match_expressions: list[Requirement] = []
    match_fields: list[Requirement] = []


class NodeSelector(Struct, frozen=True):
    node_selector_terms: list[NodeSelectorTerm] = []


class Condition(Struct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    last_probe_time: str | None = None
    last_heartbeat_time: str | None = None
    observed_generation: int = 0


def version_number(text: str) -> int:
    """A resourceVersion as a number; an absent or foreign one counts as 0."""
    return int(text) if text.isascii() and text.isdigit() else 0


def reference_to(obj: KubeObject) -> ObjectReference:
    """A full reference to an object."""
    return ObjectReference(
        api_version=obj.resource.api_version,
        kind=obj.resource.kind,
        namespace=obj.namespace,
        name=obj.name,
        uid=obj.uid,
        resource_version=obj.metadata.resource_version,
    )


def as_document(obj: Any) -> Any:
    """A struct (or plain data) as JSON-ready plain data; an object gets its apiVersion and kind."""
    document = msgspec.to_builtins(obj)
    if isinstance(obj, KubeObject):
        return {"apiVersion": obj.resource.api_version, "kind": obj.resource.kind, **document}
    return document


def timestamp_text(seconds: float) -> str:
    """RFC 3339 in whole seconds, as Kubernetes writes `Time`."""
    return _second_text(int(seconds))


@functools.lru_cache(maxsize=64)  # one moment is written many times: into each condition of a status
def _second_text(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp_text(seconds: float) -> str:
    """RFC 3339 with microseconds, as Kubernetes writes `MicroTime`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(text: str | None) -> float | None:
    """A timestamp as seconds since the epoch; an absent or malformed one is None."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
