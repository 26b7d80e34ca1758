"""Who is asking: bearer tokens, client certificates, ServiceAccount tokens.

Owns: authentication and the tokens of ServiceAccounts.
May not touch: what a user may do; that is `authorize`.
Start reading at: `Authenticator.identify`.
"""

import base64
import hmac
import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from moorage.apiserver.certs import Identity

ISSUER = "https://kubernetes.default.svc.cluster.local"
AUTHENTICATED = "system:authenticated"
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

    def __init__(self, identity: Identity) -> None:
        self._token = identity.token.encode()
        key = serialization.load_pem_private_key(identity.signing_key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
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
        now = int(time.time())
        private: dict[str, Any] = {
            "namespace": account["namespace"],
            "serviceaccount": {"name": account["name"], "uid": account["uid"]},
        }
        if bound:
            private[str(bound.get("kind", "")).lower()] = {"name": bound.get("name"), "uid": bound.get("uid")}
        claims = {
            "aud": audiences or [ISSUER],
            "exp": now + seconds,
            "iat": now,
            "nbf": now,
            "iss": ISSUER,
            "jti": str(uuid.uuid4()),
            "kubernetes.io": private,
            "sub": f"system:serviceaccount:{account['namespace']}:{account['name']}",
        }
        head = _b64(msgspec.json.encode({"alg": "ES256", "typ": "JWT"}))
        signed = f"{head}.{_b64(msgspec.json.encode(claims))}"
        r, s = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_b64(r.to_bytes(32) + s.to_bytes(32))}", float(now + seconds)

    def _verified(self, token: str) -> dict[str, Any] | None:
        try:
            head, body, signature = token.split(".")
            raw = _unb64(signature)
            der = encode_dss_signature(int.from_bytes(raw[:32]), int.from_bytes(raw[32:]))
            self._key.public_key().verify(der, f"{head}.{body}".encode(), ec.ECDSA(hashes.SHA256()))
            claims = msgspec.json.decode(_unb64(body))
        except (InvalidSignature, ValueError, msgspec.MsgspecError):
            return None
        return claims if isinstance(claims, dict) else None


def _service_account(claims: dict[str, Any]) -> User:
    name = str(claims.get("sub", ""))
    namespace = name.split(":")[2] if name.count(":") == 3 else ""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", AUTHENTICATED)
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


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
