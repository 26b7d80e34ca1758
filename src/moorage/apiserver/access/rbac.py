"""RBAC rules, and an index from users and groups to the rules that hold for them.

Owns: `AccessRule`, and `RbacIndex`, which follows the Roles and bindings in the store.
Start reading at: `RbacIndex.rules_for`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from moorage.apiserver.access.attributes import Attributes
from moorage.apiserver.access.authentication import User
from moorage.apiserver.kinds.registry import Object
from moorage.apiserver.store.store import Key, PendingChange, Store, decode
from moorage.kube.objects.meta import LabelSelector
from moorage.kube.selectors import LabelMatch

GROUP = "rbac.authorization.k8s.io"
ROLES, CLUSTER_ROLES = f"roles.{GROUP}", f"clusterroles.{GROUP}"
ROLE_BINDINGS, CLUSTER_ROLE_BINDINGS = f"rolebindings.{GROUP}", f"clusterrolebindings.{GROUP}"


@dataclass(frozen=True, slots=True)
class AccessRule:
    """One rule of a Role."""

    verbs: frozenset[str]
    groups: frozenset[str] = frozenset()
    resources: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    urls: frozenset[str] = frozenset()

    @classmethod
    def of(cls, rule: Object) -> "AccessRule":
        parts = (rule.get(key) or () for key in ("verbs", "apiGroups", "resources", "resourceNames", "nonResourceURLs"))
        return cls(*(frozenset(part) for part in parts))

    def allows(self, asked: Attributes) -> bool:
        if not _has(self.verbs, asked.verb):
            return False
        if asked.path:
            return any(url_covers(url, asked.path) for url in self.urls)
        resource = f"{asked.resource}/{asked.subresource}" if asked.subresource else asked.resource
        return (
            _has(self.groups, asked.group)
            and self.has_resource(resource)
            and (not self.names or asked.name in self.names)
        )

    def has_resource(self, resource: str) -> bool:
        """Whether `pods` or `pods/log` is covered; `*/log` covers the latter, `pods/*` covers nothing."""
        if _has(self.resources, resource):
            return True
        _, slash, subresource = resource.partition("/")
        return bool(slash) and f"*/{subresource}" in self.resources

    def covers(self, other: "AccessRule") -> bool:
        """Whether this rule alone grants everything that the other rule grants."""
        if not ("*" in self.verbs or other.verbs <= self.verbs):
            return False
        if not all(any(url_covers(own, url) for own in self.urls) for url in other.urls):
            return False
        if not other.resources:
            return True
        return (
            ("*" in self.groups or other.groups <= self.groups)
            and all(self.has_resource(resource) for resource in other.resources)
            and (not self.names or (bool(other.names) and other.names <= self.names))
        )

    def parts(self) -> "Iterator[AccessRule]":
        """Return rules with one verb on one resource, name or URL each that together grant the same."""
        for verb in map(_one, self.verbs):
            for url in self.urls:
                yield AccessRule(verb, urls=_one(url))
            for group in map(_one, self.groups):
                for resource in map(_one, self.resources):
                    for name in map(_one, self.names) if self.names else (_ANY_NAME,):
                        yield AccessRule(verb, group, resource, name)

    @property
    def part_count(self) -> int:
        on_resources = len(self.groups) * len(self.resources) * max(1, len(self.names))
        return len(self.verbs) * (len(self.urls) + on_resources)

    def document(self) -> Object:
        fields = {"verbs": self.verbs, "apiGroups": self.groups, "resources": self.resources,
                  "resourceNames": self.names, "nonResourceURLs": self.urls}  # fmt: skip
        return {key: sorted(value) for key, value in fields.items() if value}


MOST_RULES = 20_000
_ANY_NAME: frozenset[str] = frozenset()
EVERYTHING = (
    AccessRule(frozenset("*"), frozenset("*"), frozenset("*")),
    AccessRule(frozenset("*"), urls=frozenset("*")),
)


def url_covers(pattern: str, url: str) -> bool:
    return pattern in ("*", url) or (pattern.endswith("*") and url.startswith(pattern.rstrip("*")))


def _has(allowed: frozenset[str], value: str) -> bool:
    return value in allowed or "*" in allowed


def _one(value: str) -> frozenset[str]:
    return frozenset((value,))


@dataclass(frozen=True, slots=True)
class GrantedRole:
    """A Role or ClusterRole; `selectors` choose the ClusterRoles whose rules it takes over."""

    rules: tuple[AccessRule, ...]
    labels: dict[str, str]
    selectors: tuple[LabelMatch, ...] = ()

    @classmethod
    def of(cls, obj: Object) -> "GrantedRole":
        selectors = (obj.get("aggregationRule") or {}).get("clusterRoleSelectors") or []
        return cls(
            tuple(AccessRule.of(rule) for rule in obj.get("rules") or []),
            obj["metadata"].get("labels") or {},
            tuple(LabelMatch.of(msgspec.convert(selector, LabelSelector)) for selector in selectors),
        )


class RbacIndex:
    """The Roles and bindings of a store, by whom they concern. Follows every commit."""

    def __init__(self, store: Store) -> None:
        self._roles: dict[Key, GrantedRole] = {}  # the namespace of a ClusterRole is empty
        self._aggregated: dict[str, tuple[AccessRule, ...]] = {}
        self._subjects: dict[Key, list[str]] = {}
        self._refs: dict[tuple[str, str], dict[Key, Object]] = {}  # namespace and subject: roleRefs by binding
        for resource in (ROLES, CLUSTER_ROLES, ROLE_BINDINGS, CLUSTER_ROLE_BINDINGS):
            for key, record in store.table(resource).records.items():
                self._note(resource, key, record.body)
        store.on_commit.append(self._on_commit)

    def rules_for(self, user: User, namespace: str) -> Iterator[AccessRule]:
        """Return the rules that hold for a user in a namespace; an empty namespace is the cluster itself.

        An account may bind itself to any number of Roles, and each request reads its rules: what is beyond MOST_RULES
        grants nothing.
        """
        return itertools.islice(self._rules_for(user, namespace), MOST_RULES)

    def _rules_for(self, user: User, namespace: str) -> Iterator[AccessRule]:
        subjects = (f"User:{user.name}", *(f"Group:{group}" for group in user.groups))
        for where in dict.fromkeys(("", namespace)):  # the cluster first: no namespace displaces what it grants
            for subject in subjects:
                for ref in self._refs.get((where, subject), {}).values():
                    yield from self.rules_of(ref, where) or ()

    def rules_of(self, ref: Object, namespace: str) -> tuple[AccessRule, ...] | None:
        """Return the rules behind a roleRef; None if there is no such Role."""
        name = str(ref.get("name") or "")
        if ref.get("kind") != "ClusterRole":
            role = self._roles.get((namespace, name)) if namespace else None
            return role.rules if role else None
        role = self._roles.get(("", name))
        if role is None or not role.selectors:
            return role.rules if role else None
        found = self._aggregated.get(name)
        if found is None:
            found = self._aggregated[name] = self._aggregate(role)
        return found

    def _aggregate(self, role: GrantedRole) -> tuple[AccessRule, ...]:
        """Join the rules of the ClusterRoles that an aggregationRule selects. Stored rules are left out: in Kubernetes
        a controller overwrites them."""
        others = [other for (where, _), other in self._roles.items() if not where and other is not role]
        chosen = [other for other in others if any(match.matches(other.labels) for match in role.selectors)]
        return tuple(dict.fromkeys(rule for other in chosen for rule in other.rules))

    def _on_commit(self, changes: list[PendingChange]) -> None:
        for change in changes:
            if change.resource.endswith(GROUP):
                self._note(change.resource, change.key, None if change.kind == "DELETED" else change.record.body)

    def _note(self, resource: str, key: Key, body: bytes | None) -> None:
        obj: Object | None = decode(body) if body else None
        if resource in (ROLES, CLUSTER_ROLES):
            self._aggregated.clear()
            self._roles.pop(key, None)
            if obj is not None:
                self._roles[key] = GrantedRole.of(obj)
            return
        for subject in self._subjects.pop(key, ()):
            self._refs[key[0], subject].pop(key, None)
        if obj is not None:
            subjects = [name for one in obj.get("subjects") or [] if (name := _subject(one, key[0]))]
            self._subjects[key] = subjects
            for subject in subjects:
                self._refs.setdefault((key[0], subject), {})[key] = obj.get("roleRef") or {}


def _subject(subject: Object, namespace: str) -> str:
    """Return the key of a subject in the index; an empty string if it matches no user."""
    kind, name = subject.get("kind"), subject.get("name")
    if kind in ("User", "Group"):
        return f"{kind}:{name}"
    where: Any = subject.get("namespace") or namespace
    return f"User:system:serviceaccount:{where}:{name}" if kind == "ServiceAccount" and where else ""
