"""Who is asking: bearer tokens, client certificates, ServiceAccount tokens.

Owns: authentication and the tokens of ServiceAccounts.
May not touch: what a user may do; that is `authorize`.
Start reading at: `Authenticator.identify`.
"""

import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moorage.apiserver.access.pki import ServerIdentity

if TYPE_CHECKING:
    from moorage.apiserver.access.tokens import Signer

ISSUER = "https://kubernetes.default.svc.cluster.local"
ANONYMOUS = "system:anonymous"
AUTHENTICATED = "system:authenticated"
UNAUTHENTICATED = "system:unauthenticated"
MASTERS = "system:masters"


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


class Authenticator:
    """Tells users from credentials; None is a stranger."""

    def __init__(self, identity: ServerIdentity) -> None:
        self._token = identity.token.encode()
        self._key_path = identity.signing_key
        self._loaded: Signer | None = None
        self._known: dict[str, tuple[float, User]] = {}

    def identify(self, authorization: str, certificate: dict[str, Any] | None) -> User | None:
        """The user behind a request's credentials; a bad token is not excused by a good certificate."""
        if authorization:
            scheme, _, token = authorization.partition(" ")
            return self.user_of(token.strip()) if scheme.lower() == "bearer" else None
        if certificate:
            return _user_from(certificate)
        return None

    def user_of(self, token: str) -> User | None:
        if hmac.compare_digest(token.encode(errors="replace"), self._token):
            return ADMIN
        if token.count(".") != 2 or len(token) > 4096:
            return None
        known = self._known.get(token)
        if known is not None and known[0] > time.time():
            return known[1]
        claims = self._verified(token)
        if claims is None or claims.get("exp", 0) < time.time() or claims.get("iss") != ISSUER:
            return None
        user = _service_account(claims)
        if len(self._known) > 1000:
            self._known.clear()
        self._known[token] = (min(claims["exp"], time.time() + 60), user)
        return user

    def audiences_of(self, token: str) -> list[str]:
        claims = self._verified(token) if token.count(".") == 2 else None
        return list((claims or {}).get("aud") or [])

    def issue(
        self, account: dict[str, str], audiences: list[str], seconds: int, bound: dict[str, Any] | None
    ) -> tuple[str, float]:
        """A token for a ServiceAccount {namespace, name, uid}, and when it ends."""
        return self._signer().issue(account, audiences, seconds, bound)

    def _verified(self, token: str) -> dict[str, Any] | None:
        return self._signer().verified(token)

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


def _service_account(claims: dict[str, Any]) -> User:
    name = str(claims.get("sub", ""))
    account = account_of(name)
    groups = (*account_groups(account[0] if account else ""), AUTHENTICATED)
    private = claims.get("kubernetes.io") or {}
    return User(name, groups, (private.get("serviceaccount") or {}).get("uid", ""))


def _user_from(certificate: dict[str, Any]) -> User | None:
    name, groups = "", []
    for relative in certificate.get("subject", ()):
        for key, value in relative:
            if key == "commonName":
                name = value
            elif key == "organizationName":
                groups.append(value)
    return User(name, (*groups, AUTHENTICATED)) if name else None
