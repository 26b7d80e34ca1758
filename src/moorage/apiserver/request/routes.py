"""From a path to what it names.

Owns: the shape of resource URLs, including the old `/watch/` ones.
May not touch: bodies and storage.
Start reading at: `route`.
"""

from dataclasses import dataclass
from urllib.parse import unquote

from moorage.apiserver.kinds.registry import KindRegistry


@dataclass(frozen=True, slots=True)
class Route:
    """The parts of a resource path; `plural` is empty for the group-version itself."""

    group: str
    version: str
    plural: str = ""
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    is_watch: bool = False


def route(raw_path: str, registry: KindRegistry) -> Route | None:
    """The route of a path below /api or /apis; None when it can be no resource."""
    parts = [unquote(part) for part in raw_path.strip("/").split("/")]
    if parts[0] == "api" and len(parts) >= 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    is_watch = bool(rest) and rest[0] == "watch"
    if is_watch:
        rest = rest[1:]
    if not all(rest):
        return None  # an empty part between slashes names nothing
    found = _within(group, version, rest, registry)
    if found is None or not is_watch:
        return found
    return Route(found.group, found.version, found.plural, found.namespace, found.name, found.subresource, True)


def _within(group: str, version: str, rest: list[str], registry: KindRegistry) -> Route | None:
    if not rest:
        return Route(group, version)
    namespace = ""
    if rest[0] == "namespaces" and len(rest) >= 3 and (group or rest[2] not in ("status", "finalize")):
        namespace, rest = rest[1], rest[2:]
    plural, name, *sub = [*rest, ""] if len(rest) == 1 else rest
    kind = registry.find(group, version, plural)
    if kind is not None and namespace and not kind.is_namespaced:
        return None
    return Route(group, version, plural, namespace, name, "/".join(sub))
