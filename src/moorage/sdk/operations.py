"""What the gRPC services of this library call: one method for each CSI call, with plain values.

Owns: the interface between the services (`controller`, `groups`, `node`), which check requests and write answers, and
what carries the calls out: the hooks of a `Driver` (`controller_hooks`, `node_hooks`), or a whole product such as the
Moorage plugin. Not public.
Start reading at: `ControllerOperations`, `NodeOperations`.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Generic, ParamSpec, TypeAlias, TypeVar

from moorage.sdk.model import (
    Access,
    Attachment,
    Block,
    Capacity,
    CreateVolume,
    Expanded,
    Group,
    Health,
    NodeVolume,
    Secrets,
    Segments,
    SizeRange,
    Snapshot,
    Stats,
    StorageHealth,
    Volume,
)

P = ParamSpec("P")
T = TypeVar("T")
Answer: TypeAlias = T | Awaitable[T]
"""An operation may be `def`, which then runs in a thread, or `async def`."""

Blocks: TypeAlias = AsyncIterator[Block] | Iterator[Block]

ALPHA = frozenset(
    {"GET_VOLUME_HEALTH", "LIST_VOLUME_HEALTH", "GET_STORAGE_HEALTH", "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS"}
)
"""Capabilities that CSI 1.13 added as alpha; callers of 1.12 do not know them."""

_MOST_THREADS = 32


secrets_of_call: ContextVar[Secrets | None] = ContextVar("secrets_of_call", default=None)
"""The secrets of the request that the running operation answers."""


class BlockingCalls:
    """Runs operations: coroutines in the event loop, all others in threads. One that has begun runs to its end."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="work")

    async def run(self, call: Callable[P, Answer[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it, and return what it returns."""
        if inspect.iscoroutinefunction(call):
            answer: T = await call(*args, **kwargs)
            return answer
        work = partial(copy_context().run, partial(call, *args, **kwargs))
        done: T = await asyncio.get_running_loop().run_in_executor(self._threads, work)  # type: ignore[arg-type]
        return done

    def close(self) -> None:
        """Wait for the calls that run."""
        self._threads.shutdown(wait=True)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of many, in a stable order. `next` is where the rest begins, "" at the end."""

    items: Sequence[T]
    next: str = ""


@dataclass(frozen=True, slots=True)
class VolumeStatus:
    """A volume, the nodes that it is attached to, and what is wrong with it."""

    volume: Volume
    nodes: Sequence[str] = ()
    health: Sequence[Health] = ()


@dataclass(frozen=True, slots=True)
class VolumeUse:
    """How full a published volume is, and what is wrong with it. None means that it cannot be told."""

    stats: Stats | None
    health: Sequence[Health] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What a caller believes of a volume."""

    volume_id: str
    accesses: Sequence[Access]
    context: Mapping[str, str]
    parameters: Mapping[str, str]
    mutable_parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """What kind of volume a caller would like to make, and where."""

    accesses: Sequence[Access]
    parameters: Mapping[str, str]
    segments: Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """A request for a snapshot of a volume that may not exist."""

    name: str
    snapshot_id: str
    volume_id: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    requisite: Sequence[Segments] = ()
    secrets: Secrets = field(default_factory=Secrets)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A request for a snapshot of several volumes, which may not exist."""

    name: str
    group_id: str
    volume_ids: Sequence[str]
    parameters: Mapping[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Who this node is, where it is, and how many volumes it takes (0: the caller decides)."""

    node_id: str
    max_volumes: int = 0
    segments: Segments = field(default_factory=dict)


class _Operations:
    """A set of operations, of which some are served."""

    hidden: frozenset[str] = frozenset()
    """Capabilities that are not announced although their calls are served."""
    why_not_served: ClassVar[str] = "this driver does not offer this call"

    def serves(self, *operations: str) -> bool:
        """Return whether all of these are served; others are UNIMPLEMENTED."""
        return all(getattr(type(self), each) is not getattr(_base_of(self), each) for each in operations)


class ControllerOperations(_Operations):
    """The controller calls. Requests are checked, ids are not empty, and no two calls run for one object."""

    clones: bool = False
    """Whether `create_volume` copies volumes as well as snapshots."""

    def create_volume(self, request: CreateVolume) -> Answer[Volume]:
        """Return the volume of this name, made now or found. Raises AlreadyExists if it is another one."""
        raise NotImplementedError

    def delete_volume(self, volume_id: str) -> Answer[None]:
        raise NotImplementedError

    def list_volumes(self, after: str, most: int) -> Answer[Page[VolumeStatus]]:
        raise NotImplementedError

    def get_volume(self, volume_id: str) -> Answer[VolumeStatus]:
        raise NotImplementedError

    def volume_health(self, volume_id: str) -> Answer[Sequence[Health]]:
        raise NotImplementedError

    def list_health(self, after: str, most: int) -> Answer[Page[tuple[str, Sequence[Health]]]]:
        """Return only volumes that something is wrong with."""
        raise NotImplementedError

    def why_not_valid(self, question: Validation) -> Answer[str]:
        """Return why the volume is not what the caller believes, "" if it is."""
        raise NotImplementedError

    def capacity(self, request: CapacityRequest) -> Answer[Capacity]:
        raise NotImplementedError

    def expand_volume(self, volume_id: str, size: SizeRange, access: Access | None) -> Answer[Expanded]:
        raise NotImplementedError

    def modify_volume(self, volume_id: str, parameters: Mapping[str, str]) -> Answer[None]:
        raise NotImplementedError

    def attach(self, volume_id: str, node_id: str, access: Access, is_read_only: bool) -> Answer[Attachment]:
        raise NotImplementedError

    def detach(self, volume_id: str, node_id: str) -> Answer[None]:
        """Detach from one node, or from all if `node_id` is empty."""
        raise NotImplementedError

    def create_snapshot(self, request: SnapshotRequest) -> Answer[Snapshot]:
        raise NotImplementedError

    def delete_snapshot(self, snapshot_id: str) -> Answer[None]:
        raise NotImplementedError

    def get_snapshot(self, snapshot_id: str) -> Answer[Snapshot]:
        raise NotImplementedError

    def list_snapshots(self, snapshot_id: str, volume_id: str, after: str, most: int) -> Answer[Page[Snapshot]]:
        """Return those that match both ids, where an empty one matches all."""
        raise NotImplementedError

    def create_group(self, request: GroupRequest) -> Answer[Group]:
        raise NotImplementedError

    def delete_group(self, group: Group) -> Answer[None]:
        raise NotImplementedError

    def find_group(self, group_id: str) -> Answer[Group | None]:
        raise NotImplementedError

    def allocated_blocks(self, snapshot: Snapshot, offset: int) -> Answer[Blocks]:
        raise NotImplementedError

    def changed_blocks(self, base: Snapshot, target: Snapshot, offset: int) -> Answer[Blocks]:
        raise NotImplementedError


class NodeOperations(_Operations):
    """The node calls. Paths are absolute, and no two calls run for one volume."""

    mount_group: bool = False
    """Whether published files belong to `access.mount_group`."""

    def info(self) -> NodeInfo:
        raise NotImplementedError

    def stage(self, volume: NodeVolume, path: str) -> Answer[None]:
        raise NotImplementedError

    def unstage(self, volume_id: str, path: str) -> Answer[None]:
        raise NotImplementedError

    def publish(self, volume: NodeVolume, path: str) -> Answer[None]:
        raise NotImplementedError

    def unpublish(self, volume_id: str, path: str) -> Answer[None]:
        raise NotImplementedError

    def stats(self, volume_id: str, path: str) -> Answer[VolumeUse]:
        raise NotImplementedError

    def expand(self, volume_id: str, path: str, size: SizeRange, access: Access | None) -> Answer[int]:
        raise NotImplementedError

    def health(self, volume_id: str, paths: Sequence[str]) -> Answer[Sequence[Health]]:
        raise NotImplementedError

    def storage_health(self) -> Answer[Sequence[StorageHealth]]:
        raise NotImplementedError


def _base_of(operations: _Operations) -> type[_Operations]:
    return ControllerOperations if isinstance(operations, ControllerOperations) else NodeOperations
