"""Acting as another user, as `kubectl --as` asks for.

Owns: the `Impersonate-*` headers and the rights that they need.
Start reading at: `impersonated`.
"""

from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from moorage.apiserver.access.attributes import Attributes
from moorage.apiserver.access.authentication import (
    ANONYMOUS,
    AUTHENTICATED,
    UNAUTHENTICATED,
    User,
    account_groups,
    account_of,
)
from moorage.apiserver.access.authorization import Authorizer
from moorage.apiserver.errors import bad_request

_PREFIX = "impersonate-"
_EXTRA = "impersonate-extra-"
_AUTHENTICATION = "authentication.k8s.io"


def impersonated(user: User, headers: Mapping[str, str], authorizer: Authorizer) -> User:
    """Return the user that a request acts as: the caller itself if no header says otherwise.

    Each user, group, uid and extra value needs the verb `impersonate`. Raises 403 if one is not granted, 400 if the
    headers name no user.
    """
    sent = [(name.lower(), value) for name, value in headers.items() if name.lower().startswith(_PREFIX)]
    if not sent:
        return user
    names = [value for name, value in sent if name == "impersonate-user"]
    if len(names) != 1 or not names[0]:
        raise bad_request("Impersonate-User must name one user if any other Impersonate header is sent")
    groups = [value for name, value in sent if name == "impersonate-group"]
    uids = [value for name, value in sent if name == "impersonate-uid"]
    extra = [(unquote(name.removeprefix(_EXTRA)), value) for name, value in sent if name.startswith(_EXTRA)]
    for asked in _needed(names[0], groups, uids, extra):
        authorizer.allow(user, asked)
    return User(names[0], _groups(names[0], groups), uids[0] if uids else "", tuple(extra))


def _needed(name: str, groups: list[str], uids: list[str], extra: list[tuple[str, str]]) -> Iterator[Attributes]:
    account = account_of(name)
    if account is not None:
        yield Attributes("impersonate", "", "serviceaccounts", "", *account)
    else:
        yield Attributes("impersonate", "", "users", name=name)
    for group in groups:
        yield Attributes("impersonate", "", "groups", name=group)
    for uid in uids:
        yield Attributes("impersonate", _AUTHENTICATION, "uids", name=uid)
    for key, value in extra:
        yield Attributes("impersonate", _AUTHENTICATION, "userextras", key, name=value)


def _groups(name: str, groups: list[str]) -> tuple[str, ...]:
    """Add the groups that follow from the name: those of an account, and that of every authenticated user."""
    account = account_of(name)
    found = [*groups, *(account_groups(account[0]) if account and not groups else ())]
    every = UNAUTHENTICATED if name == ANONYMOUS else AUTHENTICATED
    return tuple(dict.fromkeys([*found, every]))
