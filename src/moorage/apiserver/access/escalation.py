"""What the writer of an object may do beyond the verb of its request.

Owns: the right to create through PUT and apply, and the limits on granting: a user may grant only what it holds, unless
it may `escalate` the Role or `bind` it, as in Kubernetes. Also who may say which certificate a node has.
Start reading at: `UserGuard.check_write`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from moorage.apiserver.access.attributes import Attributes
from moorage.apiserver.access.authentication import User
from moorage.apiserver.access.authorization import Authorizer
from moorage.apiserver.access.rbac import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    EVERYTHING,
    GROUP,
    ROLE_BINDINGS,
    ROLES,
    AccessRule,
)
from moorage.apiserver.errors import forbidden, not_found
from moorage.apiserver.kinds.registry import Object
from moorage.apiserver.request.options import WriteGuard
from moorage.kube.names import SERVING_CERTIFICATE

_MOST_PARTS = 3000  # of the rules in one write; each is compared with every rule that the writer holds
_MOST_COMPARISONS = 2_000_000
_MOST_WORDS = 20_000  # verbs, resources, names and subjects in one write


@dataclass(frozen=True, slots=True)
class UserGuard(WriteGuard):
    """The limits of one user's write; `asked` is what the request was authorized for."""

    authorizer: Authorizer
    user: User
    asked: Attributes

    def check_create(self) -> None:
        """Raise 403 if the user may not create what it updates or patches."""
        self.authorizer.allow(self.user, replace(self.asked, verb="create"))

    def check_write(self, stored_as: str, new: Object, old: Object | None) -> None:
        """Raise 403 if a Role or a binding would grant what the user does not hold."""
        if self.authorizer.is_free(self.user):
            return
        if stored_as in (ROLES, CLUSTER_ROLES):
            rules = new.get("rules") or []
            self._check_size(new, len(rules) + sum(len(words or ()) for rule in rules for words in rule.values()))
            self._check_role(new, old)
        elif stored_as in (ROLE_BINDINGS, CLUSTER_ROLE_BINDINGS):
            self._check_size(new, len(new.get("subjects") or ()))
            self._check_binding(new, old)
        elif stored_as == "nodes":
            self._check_node(new, old)

    def _check_node(self, new: Object, old: Object | None) -> None:
        """Raise 403 if the user may not say which certificate is the node's."""
        name = new["metadata"].get("name", "")
        if _certificate(new) == _certificate(old):
            return
        if self.user.name == f"system:node:{name}" and "system:nodes" in self.user.groups:
            return
        self.authorizer.allow(self.user, Attributes("attest", "", "nodes", name=name))

    def _check_size(self, obj: Object, words: int) -> None:
        if words > _MOST_WORDS:
            why = f"it has {words} rules, verbs, resources, names and subjects; at most {_MOST_WORDS} are allowed"
            raise forbidden(self.asked.resource, GROUP, obj["metadata"].get("name", ""), why)

    def _check_role(self, new: Object, old: Object | None) -> None:
        wanted = [AccessRule.of(rule) for rule in new.get("rules") or []] if _differs(new, old, "rules") else []
        if new.get("aggregationRule") and _differs(new, old, "aggregationRule"):
            wanted += EVERYTHING  # it takes over rules that others write later
        if wanted and not self._may("escalate", self.asked.resource, new["metadata"].get("name", "")):
            self._check_held(wanted, new)

    def _check_binding(self, new: Object, old: Object | None) -> None:
        if not (_differs(new, old, "subjects") or _differs(new, old, "roleRef")):
            return
        ref = new.get("roleRef") or {}
        resource, name = "clusterroles" if ref.get("kind") == "ClusterRole" else "roles", str(ref.get("name") or "")
        if self._may("bind", resource, name):
            return
        rules = self.authorizer.index.rules_of(ref, self.asked.namespace)
        if rules is None:
            raise not_found(resource, GROUP, name)
        self._check_held(rules, new)

    def _may(self, verb: str, resource: str, name: str) -> bool:
        return self.authorizer.decide(self.user, Attributes(verb, GROUP, resource, "", self.asked.namespace, name))

    def _check_held(self, wanted: Iterable[AccessRule], obj: Object) -> None:
        held, wanted = _Held(self.authorizer.rules_of(self.user, self.asked.namespace)), list(wanted)
        if held.most_alike * len(wanted) > _MOST_COMPARISONS:
            why = f"its {len(wanted)} rules and those of user {self.user.name!r} are too many to compare"
            raise forbidden(self.asked.resource, GROUP, obj["metadata"].get("name", ""), why)
        missing = [rule for rule in dict.fromkeys(wanted) if not held.covers(rule)]
        if sum(rule.part_count for rule in missing) <= min(_MOST_PARTS, _MOST_COMPARISONS // held.most_alike):
            missing = [part for rule in missing for part in rule.parts() if not held.covers(part)]
        if missing:
            texts = "\n".join(_text(rule) for rule in missing[:20])
            groups = ", ".join(f'"{group}"' for group in self.user.groups)
            why = (
                f'user "{self.user.name}" (groups=[{groups}]) is attempting to grant RBAC permissions not currently '
                f"held:\n{texts}"
            )
            raise forbidden(self.asked.resource, GROUP, obj["metadata"].get("name", ""), why)


def _certificate(node: Object | None) -> str:
    annotations = (node or {}).get("metadata", {}).get("annotations") or {}
    return str(annotations.get(SERVING_CERTIFICATE) or "")


class _Held:
    """The rules that a user holds, by the resources that they name."""

    def __init__(self, rules: Iterable[AccessRule]) -> None:
        self._by_resource: dict[str, list[AccessRule]] = {}
        for rule in rules:
            for resource in rule.resources or ("",):
                self._by_resource.setdefault(resource, []).append(rule)

    @property
    def most_alike(self) -> int:
        """Return with how many rules one rule may have to be compared, at least 1."""
        return max(map(len, self._by_resource.values()), default=1)

    def covers(self, rule: AccessRule) -> bool:
        """Whether one of the rules grants everything that this rule grants."""
        resource = next(iter(rule.resources), "")
        keys = {resource, "*", f"*/{resource.partition('/')[2]}"}
        return any(own.covers(rule) for key in keys for own in self._by_resource.get(key, ()))


def _differs(new: Object, old: Object | None, field: str) -> bool:
    return old is None or (new.get(field) or None) != (old.get(field) or None)


def _text(rule: AccessRule) -> str:
    words = [
        f"{key[0].upper()}{key[1:]}:[{', '.join(f'{chr(34)}{one}{chr(34)}' for one in value[:50])}]"
        for key, value in rule.document().items()
    ]
    return "{" + ", ".join(words) + "}"
