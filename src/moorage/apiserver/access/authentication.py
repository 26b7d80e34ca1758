"""Who is asking: the administrator's token, client certificates, ServiceAccount tokens.

Owns: authentication. A ServiceAccount token counts only while its account, and the object that it is bound to, exist.
Start reading at: `Authenticator.identify`.
"""

import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from moorage.apiserver.access.pki import ServerIdentity
from moorage.apiserver.store.change_log import ObjectVersion
from moorage.apiserver.store.store import Store, decode

if TYPE_CHECKING:
    from moorage.apiserver.access.tokens import Signer, TokenClaims

ISSUER = "https://kubernetes.default.svc.cluster.local"
ANONYMOUS = "system:anonymous"
AUTHENTICATED = "system:authenticated"
UNAUTHENTICATED = "system:unauthenticated"
MASTERS = "system:masters"
_LONGEST_TOKEN = 4096
_REMEMBERED = 1000
_AFTER_DELETION_S = 60.0  # as Kubernetes: an object that is being deleted may still end its work


@dataclass(frozen=True, slots=True)
class User:
    """A name and its groups; `masters` may do everything."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def is_admin(self) -> bool:
        return MASTERS in self.groups


ADMIN = User("moorage-admin", (MASTERS, AUTHENTICATED))


@dataclass(slots=True)
class _Known:
    """A token whose signature was verified, and the objects behind it as they were seen last."""

    claims: "TokenClaims"
    user: User
    seen: dict[str, ObjectVersion]


class Authenticator:
    """Tells users from credentials."""

    def __init__(self, identity: ServerIdentity, store: Store) -> None:
        self._token = identity.token.encode()
        self._key_path = identity.signing_key
        self._store = store
        self._loaded: Signer | None = None
        self._known: dict[str, _Known] = {}

    def identify(self, authorization: str, certificate: dict[str, Any] | None) -> User | None:
        """Return the user behind a request's credentials; None if there are none that are valid.

        A bad token is not excused by a good certificate.
        """
        if authorization:
            scheme, _, token = authorization.partition(" ")
            found = self.user_of(token.strip()) if scheme.lower() == "bearer" else None
            return found[0] if found else None
        return _user_from(certificate) if certificate else None

    def user_of(self, token: str, audiences: Sequence[str] = (ISSUER,)) -> tuple[User, list[str]] | None:
        """Return the user of a token and those of the audiences that it is for; None if it is valid for none."""
        if hmac.compare_digest(token.encode(errors="replace"), self._token):
            fitting = [audience for audience in audiences if audience == ISSUER]
            return (ADMIN, fitting) if fitting else None
        known = self._verified(token)
        if known is None or known.claims.expires <= time.time() or not self._exists(known):
            return None
        fitting = [audience for audience in audiences if audience in known.claims.audiences]
        return (known.user, fitting) if fitting else None

    def issue(
        self, account: dict[str, str], audiences: list[str], seconds: int, bound: dict[str, Any] | None
    ) -> tuple[str, float]:
        """Return a token for a ServiceAccount {namespace, name, uid}, and when it ends."""
        return self._signer().issue(account, audiences, seconds, bound)

    def _verified(self, token: str) -> _Known | None:
        known = self._known.get(token)
        if known is not None or token.count(".") != 2 or len(token) > _LONGEST_TOKEN:
            return known
        claims = self._signer().verified(token)
        if claims is None:
            return None
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        known = self._known[token] = _Known(claims, _account_user(claims), {})
        return known

    def _exists(self, known: _Known) -> bool:
        """Whether the account and what the token is bound to are still the objects for which it was issued."""
        from moorage.apiserver.access.tokens import BINDABLE

        claims = known.claims
        wanted = [("serviceaccounts", claims.namespace, claims.account, claims.uid)]
        for kind, name, uid in claims.bound:
            wanted.append((BINDABLE[kind], "" if kind == "node" else claims.namespace, name, uid))
        for resource, namespace, name, uid in wanted:
            record = self._store.get(resource, namespace, name)
            if record is None:
                return False
            if known.seen.get(resource) is not record:
                meta = decode(record.body)["metadata"]
                if meta["uid"] != uid or _is_past(meta.get("deletionTimestamp")):
                    return False
                if "deletionTimestamp" not in meta:  # one that is being deleted is looked at every time
                    known.seen[resource] = record
        return True

    def _signer(self) -> "Signer":
        if self._loaded is None:
            from moorage.apiserver.access.tokens import Signer

            self._loaded = Signer(self._key_path)
        return self._loaded


def account_of(user_name: str) -> tuple[str, str] | None:
    """Return namespace and name of the ServiceAccount that a user name stands for; None if it stands for none."""
    parts = user_name.split(":")
    is_account = len(parts) == 4 and parts[:2] == ["system", "serviceaccount"] and all(parts)
    return (parts[2], parts[3]) if is_account else None


def account_groups(namespace: str) -> tuple[str, str]:
    return "system:serviceaccounts", f"system:serviceaccounts:{namespace}"


def _account_user(claims: "TokenClaims") -> User:
    name = f"system:serviceaccount:{claims.namespace}:{claims.account}"
    extra = [("authentication.kubernetes.io/credential-id", f"JTI={claims.token_id}")] if claims.token_id else []
    for kind, bound_name, uid in claims.bound:
        if kind != "secret":
            extra.append((f"authentication.kubernetes.io/{kind}-name", bound_name))
            extra.append((f"authentication.kubernetes.io/{kind}-uid", uid))
    return User(name, (*account_groups(claims.namespace), AUTHENTICATED), claims.uid, tuple(extra))


def _is_past(deletion: str | None) -> bool:
    if not deletion:
        return False
    return datetime.fromisoformat(deletion).timestamp() + _AFTER_DELETION_S < time.time()


def _user_from(certificate: dict[str, Any]) -> User | None:
    name, groups = "", []
    for relative in certificate.get("subject", ()):
        for key, value in relative:
            if key == "commonName":
                name = value
            elif key == "organizationName":
                groups.append(value)
    return User(name, (*groups, AUTHENTICATED)) if name else None
