"""What a client sends beside the path, and what it gets back.

Owns: `Sent` and `Answer`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage.apiserver.errors import StatusError
from moorage.apiserver.formats.decode import json_from, yaml_from
from moorage.apiserver.formats.negotiate import document_from
from moorage.apiserver.request.apart import apart

APPLY = "application/apply-patch+yaml"
_UNREAD = object()


@dataclass(slots=True)
class Sent:
    """The parts of a request that follow the path."""

    method: str
    query: Mapping[str, str]
    content_type: str = ""
    body: bytes = b""
    _document: Any = _UNREAD

    @property
    def media(self) -> str:
        return self.content_type.split(";")[0].strip().lower()

    async def read(self) -> None:
        """Decode the body, in another thread if it is long. `document` raises what is wrong with it."""
        try:
            self._document = await apart(len(self.body), self._decoded)
        except StatusError as error:
            self._document = error

    def document(self) -> Any:
        """Return the decoded body; None if there is none. Raises 400, 413 or 415 if it cannot be read."""
        found = self._decoded() if self._document is _UNREAD else self._document
        if isinstance(found, StatusError):
            raise found
        return found

    def _decoded(self) -> Any:
        if self.method == "PATCH":
            return yaml_from(self.body) if self.media == APPLY else json_from(self.body)
        if not self.body.strip() and self.method == "DELETE":
            return None
        return document_from(self.body, self.content_type)


@dataclass(slots=True)
class Answer:
    """A complete response that is not streamed."""

    body: bytes
    http: int = 200
    media: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    more: list[bytes] = field(default_factory=list)  # further parts of a long body, in order
