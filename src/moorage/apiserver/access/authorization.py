"""What a user may do: everything for the administrator, what Roles grant for every other user.

Owns: the decision, and the refusal that a user reads.
Start reading at: `Authorizer.allow`.
"""

from collections.abc import Iterable

from moorage.apiserver.access.attributes import Attributes
from moorage.apiserver.access.authentication import User
from moorage.apiserver.access.rbac import EVERYTHING, AccessRule, RbacIndex
from moorage.apiserver.errors import StatusError, qualified


class Authorizer:
    """Decides by RBAC. If it is not enforced, every authenticated user may do everything."""

    def __init__(self, index: RbacIndex, enforces: bool) -> None:
        self.index = index
        self._enforces = enforces

    def allow(self, user: User, asked: Attributes) -> None:
        """Raise 403 if the user may not do this."""
        if not self.decide(user, asked):
            raise _refusal(user, asked)

    def decide(self, user: User, asked: Attributes) -> bool:
        return self.is_free(user) or any(rule.allows(asked) for rule in self.index.rules_for(user, asked.namespace))

    def is_free(self, user: User) -> bool:
        """Whether no rule binds this user."""
        return user.is_admin or not self._enforces

    def rules_of(self, user: User, namespace: str) -> Iterable[AccessRule]:
        """Return every rule that holds for a user in a namespace."""
        return EVERYTHING if self.is_free(user) else list(self.index.rules_for(user, namespace))


def _refusal(user: User, asked: Attributes) -> StatusError:
    if asked.path:
        message = f'forbidden: User "{user.name}" cannot {asked.verb} path "{asked.path}"'
        return StatusError(403, "Forbidden", message)
    what = qualified(asked.resource, asked.group) + (f' "{asked.name}"' if asked.name else "")
    resource = f"{asked.resource}/{asked.subresource}" if asked.subresource else asked.resource
    where = f'in the namespace "{asked.namespace}"' if asked.namespace else "at the cluster scope"
    message = (
        f'{what} is forbidden: User "{user.name}" cannot {asked.verb} resource "{resource}" in API group '
        f'"{asked.group}" {where}'
    )
    details = {"name": asked.name, "group": asked.group, "kind": asked.resource}
    return StatusError(403, "Forbidden", message, {key: value for key, value in details.items() if value})
