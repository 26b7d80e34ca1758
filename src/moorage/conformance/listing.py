"""Whole lists of volumes and snapshots, read page by page and never without an end.

Owns: the bound on pages and entries, because a driver may repeat its tokens for ever.
Start reading at: `volume_entries`, `snapshot_entries`.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from moorage.conformance.model import CheckFailed
from moorage.csi import csi_pb2 as pb
from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.csi.generated.csi_calls import CsiCalls

if TYPE_CHECKING:
    from moorage.conformance.session import Session

T = TypeVar("T")
_MOST_PAGES = 500
_MOST_ENTRIES = 100_000


async def volume_entries(client: CsiCalls, page_size: int = 0) -> list[pb.ListVolumesResponse.Entry]:
    """Return all entries of ListVolumes. Raises CheckFailed for a page that is too long, or a list without an end."""
    found: list[pb.ListVolumesResponse.Entry] = []
    token = ""
    for _ in range(_MOST_PAGES):
        answer = await client.ListVolumes(pb.ListVolumesRequest(max_entries=page_size, starting_token=token))
        _check_page("ListVolumes", len(answer.entries), page_size, token, answer.next_token)
        found += answer.entries
        token = answer.next_token
        if not token or len(found) > _MOST_ENTRIES:
            return found
    raise CheckFailed(f"ListVolumes has not ended after {_MOST_PAGES} pages")


async def snapshot_entries(
    client: CsiCalls, page_size: int = 0, volume_id: str = "", secrets: dict[str, str] | None = None
) -> list[pb.Snapshot]:
    """Return all entries of ListSnapshots, as `volume_entries` does."""
    found: list[pb.Snapshot] = []
    token = ""
    for _ in range(_MOST_PAGES):
        request = pb.ListSnapshotsRequest(
            max_entries=page_size, starting_token=token, source_volume_id=volume_id, secrets=secrets or {}
        )
        answer = await client.ListSnapshots(request)
        _check_page("ListSnapshots", len(answer.entries), page_size, token, answer.next_token)
        found += [entry.snapshot for entry in answer.entries]
        token = answer.next_token
        if not token or len(found) > _MOST_ENTRIES:
            return found
    raise CheckFailed(f"ListSnapshots has not ended after {_MOST_PAGES} pages")


def _check_page(method: str, count: int, page_size: int, token: str, following: str) -> None:
    if page_size and count > page_size:
        raise CheckFailed(f"{method}: {count} entries on a page", f"at most max_entries, {page_size}")
    if token and token == following:
        raise CheckFailed(f"{method}: the page of token {token!r} names the same token as the next one")


async def existing_volumes(session: "Session") -> frozenset[str]:
    """Return the ids of the volumes that are there; nothing if the driver does not list them."""
    if "controller:LIST_VOLUMES" not in session.capabilities:
        return frozenset()
    return frozenset([entry.volume.volume_id for entry in await _lenient(volume_entries, session.client)])


async def existing_snapshots(session: "Session") -> frozenset[str]:
    """Return the ids of the snapshots that are there; nothing if the driver does not list them."""
    if "controller:LIST_SNAPSHOTS" not in session.capabilities:
        return frozenset()
    return frozenset([snapshot.snapshot_id for snapshot in await _lenient(snapshot_entries, session.client)])


async def _lenient(read: Callable[[CsiCalls], Awaitable[list[T]]], client: CsiClient) -> list[T]:
    try:
        return await read(client)
    except (CsiError, CheckFailed):
        return []  # the checks of the list say what is wrong with it
