"""Tokens of ServiceAccounts: issuing, and verifying signature, issuer, times and audience.

Owns: the claims and the signing key. PyJWT does the rest. Whether the account still exists is up to `authentication`,
which loads this module when the first token arrives.
Start reading at: `Signer`.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

ISSUER = "https://kubernetes.default.svc.cluster.local"
_ALGORITHM = "ES256"
_REQUIRED = ["aud", "exp", "iat", "iss", "nbf", "sub"]


@dataclass(frozen=True, slots=True)
class TokenClaims:
    """What a valid token says: for whom, until when, for which audiences, and which objects must exist."""

    namespace: str
    account: str
    uid: str
    expires: float
    audiences: tuple[str, ...]
    bound: tuple[tuple[str, str, str], ...]  # kind in lower case, name, uid
    token_id: str


class Signer:
    """Signs and verifies with the server's own key."""

    def __init__(self, path: Path) -> None:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        self._public = key.public_key()

    def issue(
        self, account: dict[str, str], audiences: Sequence[str], seconds: int, bound: dict[str, Any] | None
    ) -> tuple[str, float]:
        """Return a token for a ServiceAccount {namespace, name, uid}, and when it ends."""
        now = int(time.time())
        private: dict[str, Any] = {
            "namespace": account["namespace"],
            "serviceaccount": {"name": account["name"], "uid": account["uid"]},
        }
        if bound:
            private[str(bound.get("kind", "")).lower()] = {"name": bound.get("name"), "uid": bound.get("uid")}
        claims = {
            "aud": list(audiences) or [ISSUER],
            "exp": now + seconds,
            "iat": now,
            "nbf": now,
            "iss": ISSUER,
            "jti": str(uuid.uuid4()),
            "kubernetes.io": private,
            "sub": f"system:serviceaccount:{account['namespace']}:{account['name']}",
        }
        return jwt.encode(claims, self._key, _ALGORITHM), float(now + seconds)

    def verified(self, token: str) -> TokenClaims | None:
        """Return the claims of a token; None if it is forged, expired or not yet valid. Audiences are not judged."""
        try:
            claims = jwt.decode(
                token,
                self._public,
                [_ALGORITHM],
                issuer=ISSUER,
                options={"require": _REQUIRED, "verify_aud": False},
            )
            return _claims_from(claims)
        except (jwt.InvalidTokenError, ValueError, KeyError, TypeError, RecursionError):
            return None


def _claims_from(claims: dict[str, Any]) -> TokenClaims:
    private = claims["kubernetes.io"]
    account = private["serviceaccount"]
    if claims["sub"] != f"system:serviceaccount:{private['namespace']}:{account['name']}":
        raise ValueError("the subject is not the account")
    audiences = [claims["aud"]] if isinstance(claims["aud"], str) else claims["aud"]
    return TokenClaims(
        namespace=private["namespace"],
        account=account["name"],
        uid=account["uid"],
        expires=float(claims["exp"]),
        audiences=tuple(audiences),
        bound=tuple((kind, private[kind]["name"], private[kind]["uid"]) for kind in BINDABLE if kind in private),
        token_id=str(claims.get("jti", "")),
    )


BINDABLE = {"pod": "pods", "secret": "secrets", "node": "nodes"}
