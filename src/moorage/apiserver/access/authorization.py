"""What a user may do: everything for the administrator, by Role for the others where that is switched on.

Owns: reading RBAC objects and deciding.
May not touch: requests; it is asked with attributes.
Start reading at: `Authorizer.decide`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moorage.apiserver.access.authentication import User
from moorage.apiserver.errors import StatusError
from moorage.apiserver.kinds.registry import Object
from moorage.apiserver.request.routes import Route
from moorage.apiserver.store.store import Store, decode

_RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class Attributes:
    """One thing that someone wants to do."""

    verb: str
    group: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""


class Authorizer:
    """Decides by RBAC when it is enforced; otherwise every known user may do everything."""

    def __init__(self, store: Store, enforces: bool) -> None:
        self._store = store
        self._enforces = enforces

    def allow(self, user: User, verb: str, route: Route) -> None:
        """Raise 403 when the user may not."""
        if user.is_admin or not self._enforces:
            return
        asked = Attributes(verb, route.group, route.plural, route.subresource, route.namespace, route.name)
        allowed, _ = self.decide(user, asked)
        if not allowed:
            what = f"{route.plural}.{route.group}" if route.group else route.plural
            where = f' in the namespace "{route.namespace}"' if route.namespace else " at the cluster scope"
            message = (
                f'{what}{f" {chr(34)}{route.name}{chr(34)}" if route.name else ""} is forbidden: User "{user.name}" '
                f'cannot {verb} resource "{route.plural}" in API group "{route.group}"{where}'
            )
            details = {"name": route.name, "group": route.group, "kind": route.plural}
            raise StatusError(403, "Forbidden", message, {k: v for k, v in details.items() if v})

    def decide(self, user: User, asked: Attributes) -> tuple[bool, str]:
        if user.is_admin:
            return True, ""
        if not self._enforces:
            return True, "authorization is not enforced"
        if asked.group in ("authentication.k8s.io", "authorization.k8s.io") and asked.resource.startswith(
            "selfsubject"
        ):
            return True, ""
        return any(_covers(rule, asked) for rule in self.rules_of(user, asked.namespace)), ""

    def rules_of(self, user: User, namespace: str) -> list[Object]:
        """Every rule that holds for a user in a namespace."""
        if user.is_admin or not self._enforces:
            return [
                {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
                {"verbs": ["*"], "nonResourceURLs": ["*"]},
            ]
        found: list[Object] = []
        for binding in self._bindings(namespace):
            if any(_is_subject(user, subject, binding) for subject in binding.get("subjects") or []):
                found += self._rules(binding.get("roleRef") or {}, binding["metadata"].get("namespace", ""))
        return found

    def _bindings(self, namespace: str) -> Iterator[Object]:
        yield from self._store.objects(f"clusterrolebindings.{_RBAC}")
        if namespace:
            yield from self._store.objects(f"rolebindings.{_RBAC}", namespace)

    def _rules(self, ref: Object, namespace: str) -> list[Object]:
        is_cluster = ref.get("kind") == "ClusterRole"
        resource = f"clusterroles.{_RBAC}" if is_cluster else f"roles.{_RBAC}"
        if is_cluster and ref.get("name") == "cluster-admin":
            return [
                {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
                {"verbs": ["*"], "nonResourceURLs": ["*"]},
            ]
        record = self._store.get(resource, "" if is_cluster else namespace, str(ref.get("name")))
        rules: list[Object] = decode(record.body).get("rules") or [] if record else []
        return rules


def _is_subject(user: User, subject: Object, binding: Object) -> bool:
    match subject.get("kind"):
        case "User":
            return bool(subject.get("name") == user.name)
        case "Group":
            return subject.get("name") in user.groups
        case "ServiceAccount":
            namespace = subject.get("namespace") or binding["metadata"].get("namespace", "")
            return user.name == f"system:serviceaccount:{namespace}:{subject.get('name')}"
    return False


def _covers(rule: Object, asked: Attributes) -> bool:
    if not _has(rule.get("verbs"), asked.verb):
        return False
    if asked.path:
        urls: list[Any] = rule.get("nonResourceURLs") or []
        return any(url in ("*", asked.path) or (url.endswith("*") and asked.path.startswith(url[:-1])) for url in urls)
    resource = f"{asked.resource}/{asked.subresource}" if asked.subresource else asked.resource
    resources = rule.get("resources") or []
    fits = "*" in resources or resource in resources or (asked.subresource and f"*/{asked.subresource}" in resources)
    names = rule.get("resourceNames") or []
    return bool(fits) and _has(rule.get("apiGroups"), asked.group) and (not names or asked.name in names)


def _has(allowed: Any, value: str) -> bool:
    return "*" in (allowed or []) or value in (allowed or [])
