"""Whether a volume that exists is the one that a repeated request asks for.

Start reading at: `compatible`.
"""

from moorage.storage.errors import (
    NameTaken,
)
from moorage.storage.model import CreateVolume, Volume, VolumeKind
from moorage.storage.sizes import check_range


def compatible(existing: Volume, request: CreateVolume) -> Volume:
    """The existing volume, if it is what the request describes."""
    check_range(request.required_bytes, request.limit_bytes)
    differs = _difference(existing, request)
    if differs:
        raise NameTaken("volume", request.name, differs)
    return existing


def _difference(existing: Volume, request: CreateVolume) -> str:
    size, required, limit = existing.size_bytes, request.required_bytes, request.limit_bytes
    if size < required or (limit and size > limit):
        return f"its size is {size} bytes, outside of {required} to {limit or 'any'}"
    if existing.kind is not request.kind:
        return f"its kind is {existing.kind}, not {request.kind}"
    if existing.kind is VolumeKind.IMAGE and existing.filesystem != request.filesystem:
        return f"its filesystem is {existing.filesystem or 'none'}, not {request.filesystem or 'none'}"
    if existing.thick != request.thick:
        return f"it is {'thick' if existing.thick else 'thin'}"
    if existing.source != request.source:
        made = f"from {existing.source.kind} {existing.source.id}" if existing.source else "empty"
        return f"it was made {made}"
    if dict(existing.parameters) != dict(request.parameters):
        return "its parameters differ"
    if existing.ephemeral != request.ephemeral:
        return "it belongs to another pod"
    return ""
