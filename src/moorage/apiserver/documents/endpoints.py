"""Documents that are not objects: discovery, health, version, metrics, schemas.

Owns: which path gives which document.
Start reading at: `Pages.answer`.
"""

from moorage.apiserver.documents import openapi_protobuf
from moorage.apiserver.documents.discovery import VERSION, Discovery
from moorage.apiserver.documents.metrics import ServerMetrics
from moorage.apiserver.documents.openapi import OpenApi
from moorage.apiserver.kinds.registry import KindRegistry
from moorage.apiserver.request.messages import Answer
from moorage.apiserver.store.store import Store, encode

_HEALTH = ("/healthz", "/livez", "/readyz")


class Pages:
    """The documents of one server."""

    def __init__(self, registry: KindRegistry, store: Store, counters: ServerMetrics) -> None:
        self._registry = registry
        self._store = store
        self._counters = counters
        self._discovery = Discovery(registry)
        self._openapi = OpenApi(registry)
        self._encoded: tuple[int, bytes] | None = None
        self._finders = (self._health, self._version, self._discover, self._metrics, self._schemas)

    def answer(self, path: str, accept: str) -> Answer | None:
        """Return the document at a path; None if there is none."""
        return next((found for find in self._finders if (found := find(path, accept)) is not None), None)

    def _health(self, path: str, _accept: str) -> Answer | None:
        head = "/" + path.strip("/").split("/")[0]
        if head in _HEALTH:
            return Answer(b"ok", media="text/plain; charset=utf-8")
        return None

    def _version(self, path: str, _accept: str) -> Answer | None:
        return Answer(encode(VERSION)) if path.rstrip("/") == "/version" else None

    def _discover(self, path: str, accept: str) -> Answer | None:
        parts = path.strip("/").split("/")
        if path == "/":
            return Answer(encode({"paths": ["/api", "/api/v1", "/apis", "/healthz", "/livez", "/metrics",
                                            "/openapi/v2", "/openapi/v3", "/readyz", "/version"]}))  # fmt: skip
        version = _aggregated_version(accept) if len(parts) == 1 else ""
        document = self._discovery.answer(parts, bool(version), version)
        if document is None:
            return None
        media = "application/json"
        if version:
            media = f"application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList"
        return Answer(encode(document), media=media)

    def _schemas(self, path: str, accept: str) -> Answer | None:
        if path == "/openapi/v3":
            return Answer(encode(self._openapi.index()))
        if path.startswith("/openapi/v3/"):
            document = self._openapi.v3(path.removeprefix("/openapi/v3/"))
            return Answer(encode(document)) if document else None
        if path != "/openapi/v2":
            return None
        if openapi_protobuf.ASKED in accept:
            revision = self._registry.revision
            if self._encoded is None or self._encoded[0] != revision:
                self._encoded = (revision, openapi_protobuf.document(self._openapi.v2()))
            return Answer(self._encoded[1], media=openapi_protobuf.MEDIA)
        return Answer(encode(self._openapi.v2()))

    def _metrics(self, path: str, _accept: str) -> Answer | None:
        if path != "/metrics":
            return None
        return Answer(self._counters.text(self._store), media="text/plain; version=0.0.4; charset=utf-8")


def _aggregated_version(accept: str) -> str:
    """v2 or v2beta1 when the client asks for aggregated discovery in JSON."""
    for entry in accept.split(","):
        media, *pairs = [part.strip() for part in entry.split(";")]
        parameters = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if media != "application/json":
            continue
        if parameters.get("as") == "APIGroupDiscoveryList" and parameters.get("v") in ("v2", "v2beta1"):
            return parameters["v"]
        if not parameters:
            return ""
    return ""
