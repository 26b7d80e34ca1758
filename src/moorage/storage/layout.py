"""A pool's directories, and how something appears in them whole or not at all.

Owns: the paths, durable writes (build in tmp, fsync, rename), locks, the format number with its
migrations, and the translation of the filesystem's errors into ours.
May not touch: what the records mean.
Start reading at: `Layout.building`, `Layout.publish`.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from moorage.host.errors import HostError, host_error
from moorage.storage.errors import (
    Busy,
    DamagedRecord,
    OutOfSpace,
    PoolLocked,
    PoolReadOnly,
    PoolUnusable,
    PoolVanished,
    StorageError,
)
from moorage.storage.failpoints import reached
from moorage.storage.leftovers import Leftovers
from moorage.storage.records import PoolRecord, decoded, encoded

FORMAT = 1
Migration = Callable[["PoolLayout"], None]
MIGRATIONS: Mapping[int, Migration] = {}
"""From each format to the next. A step may be repeated: a crash runs it again."""

DIRECTORIES = ("volumes", "snapshots", "groups", "trash", "tmp", "frozen", "nodes")
_LOCK_WAIT_S = 30.0
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.ENODEV, errno.ENOTDIR}


class GroupSync:
    """fsync of one directory, shared by all the threads that want it at the same time.

    A thread that arrives while an fsync runs needs the next one; of those who wait for the next
    one, the first does it for all.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._condition = threading.Condition()
        self._started = 0
        self._finished = 0
        self._failures: dict[int, OSError] = {}

    def sync(self) -> None:
        with self._condition:
            mine = self._started + 1
            while self._finished < mine and self._started > self._finished:
                self._condition.wait()
            if self._finished >= mine:
                failed = self._failures.get(mine)
                if failed is not None:
                    raise failed
                return
            self._started = mine
        failure: OSError | None = None
        try:
            fsync_path(self._path)
        except OSError as failed_now:
            failure = failed_now
        with self._condition:
            self._finished = mine
            if failure is not None:  # kept: a late waiter of this round must hear of it
                self._failures[mine] = failure
            self._condition.notify_all()
        if failure is not None:
            raise failure


class PoolLayout:
    """The paths of one pool, and the only code that changes its directories."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.volumes, self.snapshots, self.groups, self.trash, self.tmp, self.frozen, self.nodes = (
            os.path.join(root, part) for part in DIRECTORIES
        )
        self.leftovers = Leftovers(name, self.tmp)
        self._syncs = {path: GroupSync(path) for path in (self.volumes, self.snapshots, self.groups)}
        self._syncs[self.trash] = GroupSync(self.trash)
        self._identity: tuple[int, int] | None = None
        self._lock_fd = -1

    # --- opening ---------------------------------------------------------------------------

    def open(self, scope: str, owner: bool, migrations: Mapping[int, Migration] = MIGRATIONS) -> PoolRecord:
        """Make the pool or open it: the lock first, then the format."""
        with self.translated("open"):
            os.makedirs(self.root, mode=0o700, exist_ok=True)
            if owner and scope == "node":
                self._take_lock()
            try:
                record = self._ensure_format(scope, migrations)
            except BaseException:
                self.close()
                raise
            found = os.stat(self.root)
            self._identity = (found.st_dev, found.st_ino)
            return record

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def record(self, directory: str, name: str) -> bytes | None:
        """A record, or None when its object is not there; a directory without a readable record is damaged."""
        path = os.path.join(directory, name)
        for _ in range(2):
            try:
                return read_record(directory, name)
            except FileNotFoundError:
                self.check_present()
                if not os.path.isdir(directory):
                    return None  # otherwise it may have been renamed into place just now: look once more
            except OSError as failed:
                raise DamagedRecord(path, os.strerror(failed.errno or 0)) from failed
        raise DamagedRecord(path, "it is missing")

    def check_present(self) -> None:
        """Refuse to go on when the directory is not the one that was opened."""
        try:
            found = os.stat(self.root)
        except OSError as failed:
            raise PoolVanished(f"pool {self.name}: {self.root} is gone ({failed.strerror})") from failed
        if self._identity is not None and (found.st_dev, found.st_ino) != self._identity:
            raise PoolVanished(f"pool {self.name}: {self.root} is not the directory that was opened; is it mounted?")

    def _take_lock(self) -> None:
        path = os.path.join(self.root, "lock")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))  # it need only exist
        # Held open for reading: a file open for writing would keep the pool from a read-only remount.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failed:
            holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
            os.close(fd)
            if failed.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise PoolLocked(
                f"pool {self.name}: {self.root} is served by another process (pid {holder or 'unknown'}); "
                "stop it first, or give this one another directory"
            ) from failed
        self._lock_fd = fd
        with open(path, "wb") as mark:
            mark.write(f"{os.getpid()}\n".encode())

    def _ensure_format(self, scope: str, migrations: Mapping[int, Migration]) -> PoolRecord:
        path = os.path.join(self.root, "pool.json")
        try:
            raw = read_file(path)
        except FileNotFoundError:
            made = self._make_new(path, scope)
            if made is not None:
                return made
            raw = read_file(path)  # another process made the pool meanwhile
        record = decoded(raw, PoolRecord, path)
        target = max(migrations, default=FORMAT - 1) + 1 if migrations else FORMAT
        if record.format > target:
            raise PoolUnusable(
                f"pool {self.name}: {self.root} has format {record.format}, "
                f"this version knows formats up to {target}; use a newer version"
            )
        if record.scope != scope:
            raise PoolUnusable(f"pool {self.name}: {self.root} was made for scope {record.scope!r}, not {scope!r}")
        self._make_directories()
        for step in range(record.format, target):
            migrations[step](self)
            reached("migrate.done")
            record = PoolRecord(step + 1, record.id, record.scope)
            replace_file(path, encoded(record))
        return record

    def _make_new(self, path: str, scope: str) -> PoolRecord | None:
        """Make a pool of an empty directory. Returns None if another process made it at the same time."""
        known = {*DIRECTORIES, "lock", "lost+found", "guests"}
        names = [name for name in os.listdir(self.root) if not name.startswith("pool.json")]
        strangers = sorted(name for name in names if name not in known)
        if strangers:
            raise PoolUnusable(
                f"pool {self.name}: {self.root} is no pool and not empty (it holds {strangers[0]!r}); "
                "give an empty directory"
            )
        self._make_directories()
        record = PoolRecord(FORMAT, str(uuid.uuid4()), scope)
        draft = f"{path}.{record.id}"
        write_file(draft, encoded(record))
        try:
            os.link(draft, path)  # fails if the name exists, unlike a rename
        except FileExistsError:
            return None
        finally:
            os.unlink(draft)
        fsync_path(os.fspath(self.root))
        return record

    def _make_directories(self) -> None:
        for part in DIRECTORIES:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(self.root, part), 0o700)
        fsync_path(os.fspath(self.root))

    # --- changing --------------------------------------------------------------------------

    @contextlib.contextmanager
    def building(self, what: str) -> Iterator[str]:
        """A directory below tmp/ to build in; removed unless it was renamed away.

        Its lock tells a sweep that the builder lives; a dead process has no locks.
        """
        path = os.path.join(self.tmp, f"{what}-{secrets.token_hex(8)}")
        os.mkdir(path, 0o700)
        fd = -1
        try:
            reached("building.made")
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a filesystem without locks: age decides there
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
        except Exception:
            self.leftovers.remove(path)
            raise
        finally:
            if fd >= 0:
                os.close(fd)

    def publish(self, built: str, parent: str, ident: str) -> bool:
        """Give a finished directory its place, durably; False when the place is taken.

        What is inside must be fsynced already.
        """
        target = os.path.join(parent, ident)
        fsync_path(built)
        reached("publish.built")
        try:
            os.rename(built, target)  # never replaces: a published directory is not empty
        except OSError as failed:
            if failed.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self.leftovers.remove(built)
            self._syncs[parent].sync()
            return False
        reached("publish.renamed")
        self._syncs[parent].sync()
        return True

    def move(self, source: str, target: str) -> None:
        """Rename between two of the pool's directories, durably; the target must not exist."""
        reached("move.started")
        os.rename(source, target)
        reached("move.renamed")
        for parent in {os.path.dirname(source), os.path.dirname(target)}:
            self.sync(parent)

    def sync(self, parent: str) -> None:
        """fsync one of the pool's directories."""
        shared = self._syncs.get(parent)
        if shared is None:
            fsync_path(parent)
        else:
            shared.sync()

    @contextlib.contextmanager
    def locked(self, directory: str, missing: Callable[[], StorageError], *, shared: bool = False) -> Iterator[None]:
        """Hold one object against every other thread and process; it is there while held.

        Holders of the `shared` lock do not exclude each other. Raises Busy if the lock is not free in time.
        """
        path = os.path.join(directory, "lock")
        try:
            # For reading: a shared lock can be held in a read-only pool.
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except (FileNotFoundError, NotADirectoryError) as failed:
            self.check_present()
            raise missing() from failed
        try:
            _flock_within(fd, directory, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            try:
                now = os.stat(path)
            except FileNotFoundError:
                raise missing() from None
            if now.st_ino != os.fstat(fd).st_ino:  # deleted and made again while we waited
                raise Busy(f"{os.path.basename(directory)} was replaced while waiting for it; try again")
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """The filesystem's errors as ours: full, read-only, gone, or the plain system error."""
        try:
            yield
        except OSError as failed:
            if failed.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(f"{what}: pool {self.name} at {self.root} is full") from failed
            if failed.errno == errno.EROFS:
                raise PoolReadOnly(f"{what}: pool {self.name} at {self.root} is read-only") from failed
            if failed.errno in _GONE:
                self.check_present()
            # Of two names the second is the one that was to be made; a link's first may be its content.
            raise host_error(f"{what}:", failed.filename2 or failed.filename or self.root, failed) from failed
        except HostError as failed:
            if failed.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(f"{what}: pool {self.name} at {self.root} is full: {failed}") from failed
            raise


def fsync_path(path: str) -> None:
    """fsync a file or a directory by its path."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: str, content: bytes) -> None:
    """A new file, on disk when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        reached("write.unsynced")
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: str, content: bytes) -> None:
    """Change a file as a whole: readers see the old or the new one, also after a crash."""
    try:
        write_file(path + ".new", content)
        reached("replace.written")
        os.rename(path + ".new", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path + ".new")
        raise
    reached("replace.renamed")
    fsync_path(os.path.dirname(path))


def read_file(path: str) -> bytes:
    """A small file; never through a symbolic link at its end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def read_record(directory: str, name: str) -> bytes:
    """A record in an object's directory; a symbolic link planted at either place is not followed."""
    dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    finally:
        os.close(dir_fd)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def _flock_within(fd: int, directory: str, kind: int) -> None:
    deadline = time.monotonic() + _LOCK_WAIT_S
    pause = 0.0005
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except OSError as failed:
            if failed.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            if time.monotonic() > deadline:
                raise Busy(f"another operation on {os.path.basename(directory)} is still running") from failed
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
            continue
        return
