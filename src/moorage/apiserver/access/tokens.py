"""Tokens of ServiceAccounts: signed, and checked again when they come back.

Owns: the JWT format and the signing key.
May not touch: users; that is `auth`, which loads this module when the first such token turns up.
Start reading at: `Signer`.
"""

import base64
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

ISSUER = "https://kubernetes.default.svc.cluster.local"


class Signer:
    """Signs and verifies with the server's own key."""

    def __init__(self, path: Path) -> None:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key

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

    def verified(self, token: str) -> dict[str, Any] | None:
        try:
            head, body, signature = token.split(".")
            raw = _unb64(signature)
            der = encode_dss_signature(int.from_bytes(raw[:32]), int.from_bytes(raw[32:]))
            self._key.public_key().verify(der, f"{head}.{body}".encode(), ec.ECDSA(hashes.SHA256()))
            claims = msgspec.json.decode(_unb64(body))
        except (InvalidSignature, ValueError, msgspec.MsgspecError):
            return None
        return claims if isinstance(claims, dict) else None


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
