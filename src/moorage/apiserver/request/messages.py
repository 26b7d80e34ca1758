"""What a client sends beside the path, and what it gets back.

Owns: `Sent` and `Answer`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sent:
    """The parts of a request that follow the path."""

    method: str
    query: Mapping[str, str]
    content_type: str = ""
    body: bytes = b""


@dataclass(slots=True)
class Answer:
    """A complete response that is not streamed."""

    body: bytes
    http: int = 200
    media: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
