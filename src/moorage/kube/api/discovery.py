"""Is a kind served by this API server? Wait for it, if it may be installed later.

Start reading at: `is_served`, `wait_served`.
"""

import asyncio

import msgspec

from moorage.kube.api.client import Client
from moorage.kube.errors import ApiError, NotFound
from moorage.kube.objects.meta import KubeObject
from moorage.log import get_logger

log = get_logger(__name__)

_FIRST_WAIT_S = 0.1
_MAX_WAIT_S = 30.0
_RETRY_S = 1.0


class _ResourceEntry(msgspec.Struct):
    name: str = ""


class _ResourceList(msgspec.Struct):
    resources: list[_ResourceEntry] = []


async def is_served(client: Client, kind: type[KubeObject], *, retries: bool = False) -> bool:
    """Whether the API server has the kind; some clusters lack the snapshot kinds.

    With `retries` a request that fails is repeated until the server answers. Without, its error is raised.
    """
    resource = kind.resource
    path = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    while True:
        try:
            found = msgspec.json.decode(await client.request("GET", path), type=_ResourceList)
            return any(each.name == resource.plural for each in found.resources)
        except NotFound:
            return False
        except ApiError as error:
            if not retries:
                raise
            log.warning("cannot ask whether a kind is served", kind=resource.kind, reason=str(error))
            await asyncio.sleep(_RETRY_S)


async def wait_served(client: Client, kind: type[KubeObject]) -> None:
    """Return when the API server has the kind; it may be installed later."""
    wait_s = _FIRST_WAIT_S
    while not await is_served(client, kind, retries=True):
        log.info("kind is not installed; waiting for it", kind=kind.resource.kind, group=kind.resource.group)
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 1.5, _MAX_WAIT_S)
