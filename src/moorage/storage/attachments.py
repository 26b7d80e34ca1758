"""Attachments: which node may use a volume of a shared pool, with fencing tokens.

Owns: `volumes/<id>/attach/` and `nodes/`. The state of a volume's attachments is the file with the
highest number in its `attach` directory. A change is made under a draft name that only its writer
knows, and gets the next number with link(2), which fails when that number exists: compare-and-swap
without locks, on any filesystem with atomic links, safe against kill -9 at every step. The number is
the fencing token, so tokens only grow. A state is the text of a symbolic link, which has its content
from its first moment, so that one fsync is enough; a state too long for that is a file.
May not touch: mounts and devices; a node verifies its token and acts on that.
Start reading at: `Attachments.attach`, `StateFiles.swap`.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from moorage.log import get_logger
from moorage.storage.attachment_state import _SPLIT, AttachedNode, AttachmentState, StateFiles
from moorage.storage.context import PoolContext
from moorage.storage.errors import (
    AttachedDifferently,
    AttachedElsewhere,
    AttachmentsUnreadable,
    Busy,
    DamagedRecord,
    Fenced,
    InvalidValue,
    LimitReached,
    NodeNotFound,
    VolumeInUse,
    VolumeNotFound,
)
from moorage.storage.ids import VolumeId, id_from, is_volume_id
from moorage.storage.layout import read_file, replace_file
from moorage.storage.model import Attachment, PoolScope

log = get_logger(__name__)

DIRECTORY = "attach"
_MULTI_NODE = "MULTI_NODE_"
_READERS = ("MULTI_NODE_READER_ONLY", "SINGLE_NODE_READER_ONLY")


class _Node(msgspec.Struct, frozen=True):
    node_id: str
    limit: int = 0


T = TypeVar("T")


def prepare(context: PoolContext, built: str) -> None:
    """Give a volume that is being built its place for attachments, while its name is still unknown.

    GlusterFS can fail to make a directory, or a symbolic link, that another client looks up at that moment.
    """
    if context.config.scope is PoolScope.SHARED:
        with contextlib.suppress(FileExistsError):  # a repeated import
            os.mkdir(os.path.join(built, DIRECTORY), 0o700)


class Attachments:
    """The attachments of one shared pool."""

    def __init__(self, context: PoolContext, volume_directory: Callable[[str], str]) -> None:
        self._context = context
        self._layout = context.layout
        self._volume_directory = volume_directory

    # --- nodes -----------------------------------------------------------------------------

    def register_node(self, node_id: str, limit: int = 0) -> None:
        """Make a node known, with the most volumes it may have (0: no limit)."""
        if limit < 0:
            raise InvalidValue("limit", f"{limit} is negative")
        directory = self._node_directory(node_id)
        wanted = _Node(node_id, limit)
        with self._layout.translated(f"register node {node_id}"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            path = os.path.join(directory, "node.json")
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                if msgspec.json.decode(read_file(path), type=_Node) == wanted:
                    return
            replace_file(path, msgspec.json.encode(wanted))
            self._layout.sync(self._layout.nodes)

    def forget_node(self, node_id: str) -> None:
        """A node is gone for good; its attachments stay until they are detached."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._node_directory(node_id), "node.json"))

    def nodes(self) -> Mapping[str, int]:
        """The known nodes and their limits."""
        found = {}
        with self._layout.translated("list nodes"):
            for name in sorted(os.listdir(self._layout.nodes)):
                path = os.path.join(self._layout.nodes, name, "node.json")
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
                    node = msgspec.json.decode(read_file(path), type=_Node)
                    found[node.node_id] = node.limit
        return found

    def _node_directory(self, node_id: str) -> str:
        return os.path.join(self._layout.nodes, id_from(node_id, field="node_id"))

    def _node(self, node_id: str) -> _Node:
        try:
            raw = read_file(os.path.join(self._node_directory(node_id), "node.json"))
        except FileNotFoundError:
            raise NodeNotFound(node_id, self._context.config.name) from None
        try:
            return msgspec.json.decode(raw, type=_Node)
        except (msgspec.DecodeError, UnicodeDecodeError) as failed:
            raise DamagedRecord(self._node_directory(node_id), str(failed)) from failed

    # --- attaching -------------------------------------------------------------------------

    def attach(self, volume_id: str, node_id: str, mode: str, readonly: bool = False) -> Attachment:
        """Give a volume to a node; the same again gives the same token."""
        self._check_volume(volume_id)
        node = self._node(node_id)
        entry: AttachedNode | None = None

        def change(token: int, state: AttachmentState) -> AttachmentState | None:
            nonlocal entry
            if state.sealed:
                raise VolumeInUse(f"volume {volume_id} is being deleted")
            held = state.nodes.get(node_id)
            if held is not None:
                if (held.mode, held.readonly) != (mode, readonly):
                    raise AttachedDifferently(
                        f"volume {volume_id} is attached to node {node_id} as {_shown(held.mode, held.readonly)}, "
                        f"not as {_shown(mode, readonly)}"
                    )
                entry = held
                return None
            _check_others(volume_id, mode, readonly, state)
            entry = AttachedNode(token, readonly, mode)
            return AttachmentState({**state.nodes, node_id: entry}, secrets.token_hex(8))

        with self._changing(f"attach volume {volume_id}"):
            self._mark(node, volume_id)
            try:
                self._cas(volume_id).swap(change)
            except BaseException:
                self._unmark_if_detached(node_id, volume_id)
                raise
        if entry is None:
            raise Busy(f"volume {volume_id}: the attachment was not decided; try again")
        log.info("attached", volume=volume_id, node=node_id, token=entry.token)
        return Attachment(VolumeId(volume_id), node_id, entry.token, entry.readonly, entry.mode)

    def detach(self, volume_id: str, node_id: str = "") -> bool:
        """Take a volume back from a node, or from all; False when there was nothing to take."""
        if not is_volume_id(volume_id) or not os.path.isdir(self._volume_directory(volume_id)):
            self._layout.check_present()
            return False
        taken: list[str] = []

        def change(token: int, state: AttachmentState) -> AttachmentState | None:
            taken[:] = [node_id] if node_id in state.nodes else [] if node_id else list(state.nodes)
            if not taken:
                return None
            kept = {node: entry for node, entry in state.nodes.items() if node not in taken}
            return AttachmentState(kept, secrets.token_hex(8))

        with self._changing(f"detach volume {volume_id}"):
            self._cas(volume_id).swap(change)
            for node in taken or ([node_id] if node_id else []):
                self._unmark_if_detached(node, volume_id)
        if taken:
            log.info("detached", volume=volume_id, nodes=",".join(taken))
        return bool(taken)

    def seal(self, volume_id: str) -> None:
        """Before a deletion: refuse if a node has the volume, and attach it to no node from now on."""

        def change(token: int, state: AttachmentState) -> AttachmentState | None:
            if state.nodes:
                raise VolumeInUse(f"volume {volume_id} is attached to {', '.join(sorted(state.nodes))}")
            return None if state.sealed else AttachmentState({}, secrets.token_hex(8), sealed=True)

        with self._changing(f"delete volume {volume_id}"):
            self._cas(volume_id).swap(change)

    def unseal(self, directory: str) -> None:
        """Before a volume comes back from the trash, where it lies in `directory`: it can be attached again."""

        def change(token: int, state: AttachmentState) -> AttachmentState | None:
            return AttachmentState({}, secrets.token_hex(8)) if state.sealed else None

        StateFiles(os.path.join(directory, DIRECTORY)).swap(change)

    def of_volume(self, volume_id: str) -> list[Attachment]:
        """Who has the volume now."""
        self._check_volume(volume_id)
        with self._changing(f"read attachments of {volume_id}"):
            _, state = self._cas(volume_id).read()
        return [
            Attachment(VolumeId(volume_id), node, entry.token, entry.readonly, entry.mode)
            for node, entry in sorted(state.nodes.items())
        ]

    def verify(self, volume_id: str, node_id: str, token: int) -> Attachment:
        """The node's attachment, if the token is its present one."""
        for held in self.of_volume(volume_id):
            if held.node_id == node_id:
                if held.token == token:
                    return held
                raise Fenced(
                    f"volume {volume_id}: node {node_id} came with token {token}, its attachment has {held.token}"
                )
        raise Fenced(f"volume {volume_id} is not attached to node {node_id}")

    def _check_volume(self, volume_id: str) -> None:
        if not is_volume_id(volume_id) or not os.path.isdir(self._volume_directory(volume_id)):
            self._layout.check_present()
            raise VolumeNotFound(volume_id, self._context.config.name)

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """The filesystem's errors as ours; a state that it does not show is for an operator to heal.

        It is never passed over: a node may hold it, on replicas that are away.
        """
        with self._layout.translated(what):
            try:
                yield
            except OSError as failed:
                if failed.errno not in _SPLIT:
                    raise
                self._layout.check_present()
                raise AttachmentsUnreadable(what, failed) from failed

    def _cas(self, volume_id: str) -> "StateFiles":
        return StateFiles(os.path.join(self._volume_directory(volume_id), DIRECTORY))

    # --- the limit -------------------------------------------------------------------------

    def _mark(self, node: _Node, volume_id: str) -> None:
        """Count the volume for the node before it is attached: two callers at once may both be
        refused, but never both pass."""
        directory = self._node_directory(node.node_id)
        path = os.path.join(directory, volume_id)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        if not node.limit:
            return
        marks = [name for name in os.listdir(directory) if is_volume_id(name) and name != "node.json"]
        if len(marks) > node.limit:
            marks = [name for name in marks if name == volume_id or not self._forgotten(node.node_id, name)]
        if len(marks) > node.limit and not self._is_attached(node.node_id, volume_id):
            self._unmark_if_detached(node.node_id, volume_id)
            raise LimitReached(f"node {node.node_id} has {node.limit} volumes attached, which is its limit")

    def _forgotten(self, node_id: str, volume_id: str) -> bool:
        """Remove a mark that a killed attach left behind."""
        if self._is_attached(node_id, volume_id):
            return False
        path = os.path.join(self._node_directory(node_id), volume_id)
        with contextlib.suppress(FileNotFoundError):
            # A young mark may belong to an attach that is running in another process.
            if time.time() - os.stat(path).st_mtime < 60:
                return False
            os.unlink(path)
        return True

    def _unmark_if_detached(self, node_id: str, volume_id: str) -> None:
        if not self._is_attached(node_id, volume_id):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._node_directory(node_id), volume_id))

    def _is_attached(self, node_id: str, volume_id: str) -> bool:
        _, state = self._cas(volume_id).read()
        return node_id in state.nodes


def _check_others(volume_id: str, mode: str, readonly: bool, state: AttachmentState) -> None:
    """Refuse what the others' attachments do not allow."""
    for node, held in state.nodes.items():
        if not mode.startswith(_MULTI_NODE) or not held.mode.startswith(_MULTI_NODE):
            raise AttachedElsewhere(f"volume {volume_id} is attached to node {node} as {held.mode}")
        writes, held_writes = _writes(mode, readonly), _writes(held.mode, held.readonly)
        single = "MULTI_NODE_SINGLE_WRITER" in (mode, held.mode)
        if writes and held_writes and single:
            raise AttachedElsewhere(f"volume {volume_id} is attached to node {node}, which writes to it")


def _writes(mode: str, readonly: bool) -> bool:
    return not readonly and mode not in _READERS


def _shown(mode: str, readonly: bool) -> str:
    return f"{mode}{' read-only' if readonly else ''}"
