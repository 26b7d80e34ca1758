"""TLS from this server to the agents of nodes.

Owns: which certificate an agent must show, and which one this server shows.
Start reading at: `NodeTls.context_for`.

An agent records its certificate in an annotation of its Node. Only the administrator, the node itself, and accounts
with the verb `attest` on the Node may write that annotation (`escalation`). So an account that may create Nodes cannot
make this server talk to a machine of its own. Without the annotation, the agent needs a certificate of this server's
authority.
"""

import base64
import binascii
import ssl
from functools import lru_cache
from pathlib import Path

from moorage.apiserver.errors import internal
from moorage.apiserver.kinds.registry import Object
from moorage.kube.names import SERVING_CERTIFICATE


class NodeTls:
    """Makes TLS settings for the connection to one node."""

    def __init__(self, certificate: tuple[Path, Path], authority: Path) -> None:
        self._certificate = certificate
        self._authority = authority
        self._pinned = lru_cache(maxsize=64)(self._trust)

    def context_for(self, node: Object) -> ssl.SSLContext:
        """Return settings that accept this node's agent. Raises 500 if its recorded certificate is unreadable."""
        recorded = (node["metadata"].get("annotations") or {}).get(SERVING_CERTIFICATE, "")
        try:
            return self._pinned(recorded)
        except (ValueError, binascii.Error, ssl.SSLError) as error:
            raise internal(f"the certificate that node {node['metadata']['name']} records is unreadable") from error

    def _trust(self, recorded: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nothing yet, and checks the host's name
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._certificate)
        if recorded:
            context.check_hostname = False  # exactly this certificate, wherever the agent listens
            context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(cadata=base64.b64decode(recorded, validate=True))
        else:
            context.load_verify_locations(self._authority)
        return context
