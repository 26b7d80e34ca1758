"""Server-side apply.

Owns: field managers.
Start reading at: `apply_patch`.
"""

from typing import Any

from moorage.apiserver.errors import unsupported_media
from moorage.apiserver.kinds import Kind, Object
from moorage.apiserver.query import Call


async def apply_patch(resources: Any, call: Call, body: Any) -> tuple[bytes, bool]:
    raise unsupported_media("apply is not there yet")


def track_update(kind: Kind, call: Call, new: Object, old: Object, sent: Object) -> Object:
    meta: Object = new["metadata"]
    return meta
