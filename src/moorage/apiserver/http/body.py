"""Reading the body of a request within its limits.

Owns: `read_body`.
"""

import asyncio

from aiohttp import web

from moorage.apiserver.errors import StatusError, too_large_body


async def read_body(request: web.BaseRequest, limit: int, seconds: float) -> bytes:
    """Return the whole body. Raises 413 if it is too large, 408 if it does not arrive in time."""
    if not request.can_read_body:
        return b""
    if (request.content_length or 0) > limit:
        raise too_large_body(limit)
    if request.content.is_eof():  # the body came with the head, as most do
        data = request.content.read_nowait()
        if len(data) > limit:
            raise too_large_body(limit)
        return data
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > limit:
                    raise too_large_body(limit)
                chunks.append(chunk)
    except TimeoutError as error:
        raise StatusError(408, "Timeout", "the request's body did not arrive in time") from error
    return b"".join(chunks)
