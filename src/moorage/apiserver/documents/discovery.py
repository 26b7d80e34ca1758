"""What is served, told to clients: the legacy and the aggregated discovery documents.

Owns: /api, /apis, group and version lists, /version.
May not touch: storage.
Start reading at: `Discovery.answer`.
"""

from typing import Any

from moorage.apiserver.kinds.registry import Kind, KindRegistry

VERSION = {
    "major": "1", "minor": "37", "emulationMajor": "1", "emulationMinor": "37", "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "36", "gitVersion": "v1.37.0+moorage", "gitCommit": "0" * 40, "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z", "goVersion": "none", "compiler": "cpython", "platform": "linux/amd64",
}  # fmt: skip

# Resources without storage: a POST is answered at once. (group, version, Kind, plural, namespaced)
REVIEWS = (
    ("authentication.k8s.io", "v1", "TokenReview", "tokenreviews", False),
    ("authentication.k8s.io", "v1", "SelfSubjectReview", "selfsubjectreviews", False),
    ("authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", False),
    ("authorization.k8s.io", "v1", "SubjectAccessReview", "subjectaccessreviews", False),
    ("authorization.k8s.io", "v1", "LocalSubjectAccessReview", "localsubjectaccessreviews", True),
    ("authorization.k8s.io", "v1", "SelfSubjectRulesReview", "selfsubjectrulesreviews", False),
    ("", "v1", "Binding", "bindings", True),
)

_SUB_KINDS = {
    "binding": ("", "v1", "Binding", ("create",)),
    "eviction": ("policy", "v1", "Eviction", ("create",)),
    "exec": ("", "v1", "PodExecOptions", ("create", "get")),
    "log": ("", "v1", "Pod", ("get",)),
    "token": ("authentication.k8s.io", "v1", "TokenRequest", ("create",)),
    "finalize": ("", "v1", "Namespace", ("update",)),
    "scale": ("autoscaling", "v1", "Scale", ("get", "patch", "update")),
}

Document = dict[str, Any]


class Discovery:
    """Documents made from the registry; small, so made when asked for."""

    def __init__(self, registry: KindRegistry) -> None:
        self._registry = registry

    def groups(self) -> dict[str, list[str]]:
        found = self._registry.groups()
        for group, version, *_ in REVIEWS:
            versions = found.setdefault(group, [])
            if version not in versions:
                versions.append(version)
        return found

    def answer(self, parts: list[str], is_aggregated: bool, version: str = "v2") -> Document | None:
        """The document at /api, /apis, /api/v1, /apis/GROUP or /apis/GROUP/VERSION."""
        match parts:
            case ["api"]:
                return self._aggregated([""], version) if is_aggregated else _api_versions()
            case ["apis"]:
                names = [group for group in self._ordered() if group]
                return self._aggregated(names, version) if is_aggregated else self._group_list(names)
            case ["api", "v1"]:
                return self._resource_list("", "v1")
            case ["apis", group] if group in self.groups() and group:
                return self._group(group)
            case ["apis", group, version] if group and version in self.groups().get(group, []):
                return self._resource_list(group, version)
        return None

    def _ordered(self) -> list[str]:
        return sorted(self.groups(), key=lambda group: ("." in group and not group.endswith("k8s.io"), group))

    def _group(self, group: str) -> Document:
        versions = [{"groupVersion": f"{group}/{v}", "version": v} for v in self.groups()[group]]
        return {"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": versions,
                "preferredVersion": versions[0]}  # fmt: skip

    def _group_list(self, names: list[str]) -> Document:
        groups = [self._group(name) for name in names]
        for group in groups:
            del group["kind"], group["apiVersion"]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def _resource_list(self, group: str, version: str) -> Document:
        resources: list[Document] = []
        for kind in self._registry.of(group, version):
            resources.append(_resource(kind))
            resources.extend(_legacy_sub(kind, name) for name in subresources(kind))
        for review_group, review_version, name, plural, namespaced in REVIEWS:
            if (review_group, review_version) == (group, version):
                resources.append({"name": plural, "singularName": name.lower(), "namespaced": namespaced,
                                  "kind": name, "verbs": ["create"]})  # fmt: skip
        resources.sort(key=lambda resource: str(resource["name"]))
        group_version = f"{group}/{version}" if group else version
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}

    def _aggregated(self, names: list[str], version: str) -> Document:
        items = []
        for group in names:
            versions = []
            for v in self.groups()[group]:
                resources = [_aggregated_resource(kind) for kind in self._registry.of(group, v)]
                resources += [
                    {"resource": plural, "responseKind": _gvk("", "", name), "singularResource": name.lower(),
                     "scope": "Namespaced" if namespaced else "Cluster", "verbs": ["create"]}
                    for g, rv, name, plural, namespaced in REVIEWS
                    if (g, rv) == (group, v)
                ]  # fmt: skip
                resources.sort(key=lambda resource: str(resource["resource"]))
                versions.append({"version": v, "freshness": "Current", "resources": resources})
            meta: Document = {"creationTimestamp": None}
            if group:
                meta["name"] = group
            items.append({"metadata": meta, "versions": versions})
        return {"kind": "APIGroupDiscoveryList", "apiVersion": f"apidiscovery.k8s.io/{version}", "metadata": {},
                "items": items}  # fmt: skip


def subresources(kind: Kind) -> list[str]:
    """The names of a kind's subresources, sorted."""
    found = list(kind.subresources)
    if kind.has_status:
        found.append("status")
    if kind.has_scale:
        found.append("scale")
    return sorted(found)


def _resource(kind: Kind) -> Document:
    document: Document = {
        "name": kind.plural, "singularName": kind.singular, "namespaced": kind.is_namespaced, "kind": kind.name,
        "verbs": sorted(kind.verbs),
    }  # fmt: skip
    if kind.short_names:
        document["shortNames"] = list(kind.short_names)
    if kind.categories:
        document["categories"] = list(kind.categories)
    if not kind.is_custom:
        document["storageVersionHash"] = _hash(kind)
    return document


def _hash(kind: Kind) -> str:
    import base64
    import hashlib

    digest = hashlib.sha256(f"{kind.group}/{kind.version}/{kind.name}".encode()).digest()
    return base64.b64encode(digest[:8]).decode()


def _legacy_sub(kind: Kind, name: str) -> Document:
    document: Document = {"name": f"{kind.plural}/{name}", "singularName": "", "namespaced": kind.is_namespaced}
    group, version, kind_name, verbs = _sub_kind(kind, name)
    if (group, version) != (kind.group, kind.version):
        document |= {"group": group, "version": version}
    return document | {"kind": kind_name, "verbs": list(verbs)}


def _sub_kind(kind: Kind, name: str) -> tuple[str, str, str, tuple[str, ...]]:
    return _SUB_KINDS.get(name, (kind.group, kind.version, kind.name, ("get", "patch", "update")))


def _gvk(group: str, version: str, kind: str) -> Document:
    return {"group": group, "version": version, "kind": kind}


def _aggregated_resource(kind: Kind) -> Document:
    document: Document = {
        "resource": kind.plural,
        "responseKind": _gvk(kind.group, kind.version, kind.name),
        "scope": "Namespaced" if kind.is_namespaced else "Cluster",
        "singularResource": kind.singular,
        "verbs": sorted(kind.verbs),
    }
    if kind.short_names:
        document["shortNames"] = list(kind.short_names)
    if kind.categories:
        document["categories"] = list(kind.categories)
    subs = []
    for name in subresources(kind):
        group, version, kind_name, verbs = _sub_kind(kind, name)
        subs.append({"subresource": name, "responseKind": _gvk(group, version, kind_name), "verbs": list(verbs)})
    if subs:
        document["subresources"] = subs
    return document


def _api_versions() -> Document:
    return {"kind": "APIVersions", "versions": ["v1"],
            "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": "127.0.0.1"}]}  # fmt: skip
