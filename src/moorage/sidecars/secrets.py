"""Reading the secrets that CSI calls carry.

Owns: fetching and decoding. Values go into the request and nowhere else: no log, no cache, no error.
"""

import base64
import binascii

from moorage.kube.api.client import Client
from moorage.kube.errors import NotFound
from moorage.kube.objects import Secret, SecretReference
from moorage.sidecars.errors import BadParameters, SidecarError


async def read_secret(client: Client, reference: SecretReference | None) -> dict[str, str]:
    """The secret's entries as text; empty without a reference, an error when the secret is missing."""
    if reference is None or not reference.name:
        return {}
    try:
        secret = await client.get(Secret, reference.name, reference.namespace)
    except NotFound:
        raise SidecarError(f"secret {reference.namespace}/{reference.name} does not exist") from None
    try:
        return {key: base64.b64decode(value).decode() for key, value in secret.data.items()}
    except (binascii.Error, UnicodeDecodeError):
        raise BadParameters(
            f"secret {reference.namespace}/{reference.name} holds an entry that is not UTF-8 text, as CSI wants"
        ) from None
