"""What a person asks `moorage up` for, checked before anything is started.

Owns: the settings and the sentences that say what cannot work here.
May not touch: processes, mounts; it only looks.
Start reading at: `UpSettings.checked`.
"""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from moorage.cluster.layout import DataLayout
from moorage.errors import MoorageError, UsageError

_TOOLS = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs", "mount": "mount"}
_MOST_NODES = 16


class CannotRunHere(MoorageError):
    """This machine or user lacks something that the stack needs; the message says what and why."""

    code = "FAILED_PRECONDITION"


class ClusterRecord(msgspec.Struct, frozen=True):
    """What a data directory holds: the scope of its pool, and whether the driver is Moorage's own."""

    scope: str
    is_ours: bool = True


@dataclass(frozen=True)
class UpSettings:
    """One cluster on this machine."""

    data_dir: Path
    nodes: int = 1
    pool: Path | None = None
    pool_size_bytes: int = 0
    driver: str = ""
    port: int = 0
    log_level: str = "info"
    plugin_flags: tuple[str, ...] = ()
    page_port: int | None = None  # of the live page; None: no page
    scope: str = ""  # of the pool; empty: as the number of nodes calls for

    @property
    def layout(self) -> DataLayout:
        return DataLayout(self.data_dir)

    @property
    def node_names(self) -> list[str]:
        return [f"node-{number}" for number in range(1, self.nodes + 1)]

    @property
    def is_shared(self) -> bool:
        """Several nodes share one pool, so volumes are attached; one node needs no attaching."""
        return self.scope == "shared" if self.scope else self.nodes > 1

    @property
    def has_foreign_socket(self) -> bool:
        """`--driver` names a socket that is there already, not a command."""
        return self.driver.startswith("unix://") or (self.driver.startswith("/") and "{endpoint}" not in self.driver)

    def checked(self) -> "UpSettings":
        """These settings, or an error that says what is wrong and why."""
        if not 1 <= self.nodes <= _MOST_NODES:
            raise UsageError(f"--nodes {self.nodes}: want 1 to {_MOST_NODES}")
        if self.has_foreign_socket and self.nodes > 1:
            raise UsageError(
                "--driver with a socket serves one node; give a command with {endpoint} and {node} for more"
            )
        if self.driver and not self.has_foreign_socket and "{endpoint}" not in self.driver:
            raise UsageError("--driver COMMAND needs {endpoint} where the socket's address goes, and may use {node}")
        too_long = self.layout.longest_socket(self.node_names)
        if too_long is not None:
            raise UsageError(f"--data-dir is too long a path: the socket {too_long} would exceed 107 characters")
        self._check_machine()
        return self

    def continuing(self) -> "UpSettings":
        """Return these settings for what the data directory holds already, and record them there.

        A cluster keeps the scope of its pool: volumes of one node cannot become volumes of many. Raises UsageError
        if the directory holds a cluster of another shape.
        """
        record = self.layout.record
        try:
            held = msgspec.json.decode(record.read_bytes(), type=ClusterRecord)
        except FileNotFoundError:
            held = ClusterRecord("shared" if self.is_shared else "node", is_ours=not self.driver)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{record} is damaged ({error}); remove it, or give another --data-dir") from error
        where = f"{self.data_dir} holds a cluster"
        if held.is_ours == bool(self.driver):
            with_driver = "of Moorage's own driver" if held.is_ours else "of a driver given with --driver"
            raise UsageError(f"{where} {with_driver}; start it that way, or give another --data-dir")
        if held.scope == "node" and self.nodes > 1:
            raise UsageError(
                f"{where} of one node, whose volumes belong to that node; start it without --nodes, or give another "
                f"--data-dir for {self.nodes} nodes"
            )
        fresh = record.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(held))
        fresh.replace(record)  # whole, whenever this process is killed
        return replace(self, scope=held.scope)

    def _check_machine(self) -> None:
        if os.geteuid() != 0:
            raise CannotRunHere(
                "`moorage up` needs root: volumes are real filesystems on loop devices, mounted (CAP_SYS_ADMIN) into "
                "pods that run in their own mount and PID namespaces. Without root you can still use "
                "`moorage apiserver`, `controllers`, `sidecars`, `csi`, `check` and `explain`."
            )
        if not self.driver:
            path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
            missing = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool, path=path) is None})
            if missing:
                raise CannotRunHere(f"missing system tools; install {' '.join(missing)}")
        if not Path("/dev/loop-control").exists():
            raise CannotRunHere("there is no /dev/loop-control: the kernel has no loop devices (modprobe loop)")
