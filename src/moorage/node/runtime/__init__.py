"""Running containers: what the agent asks of a container runtime, and what it knows of a container.

The supervisor and its children import this package in a bare interpreter: it uses the standard library only.
Owns: the Protocol that every runtime implements. `process_runtime` is the one that there is.
Start reading at: `ContainerRuntime`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from moorage.errors import MoorageError

if TYPE_CHECKING:
    import signal
    from pathlib import Path

START_ERROR = "StartError"  # the reason of an attempt whose program was never executed
DRAINED = "drained"  # a file beside the specification: the agent stopped the container because it stops itself
# What container runtimes leave to a root that is not privileged, without CAP_MKNOD: they let it make devices and use a
# control group to keep it from opening them; here it would read the disks of the host, and so the volumes of others.
KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31})


class ContainerFailed(MoorageError):
    """A container could not be started, and why."""


class NotCreated(ContainerFailed):
    """Nothing was created, so this was no attempt. It is tried again whatever the pod's restart policy is."""


class RunningContainer:
    """One attempt at running a container."""

    __slots__ = ("attempt", "directory", "is_unsure", "log", "name", "pending_signal", "pidfd", "state", "uid")

    def __init__(
        self, uid: str, name: str, attempt: int, directory: "Path", log: "Path", state: dict[str, Any] | None = None
    ) -> None:
        self.uid = uid
        self.name = name
        self.attempt = attempt
        self.directory = directory
        self.log = log
        self.state: dict[str, Any] = {} if state is None else state
        self.pidfd = -1
        self.is_unsure = False  # its process could not be inspected: it counts as running, and keeps what it may hold
        self.pending_signal: signal.Signals | None = None  # sent once its process can be inspected

    @property
    def is_running(self) -> bool:
        return self.pidfd >= 0 or self.is_unsure

    @property
    def is_ended(self) -> bool:
        return "exit_code" in self.state

    @property
    def id(self) -> str:
        return f"{self.uid}-{self.name}-{self.attempt}"

    @property
    def exit_code(self) -> int:
        return int(self.state.get("exit_code", 137))


class Reply(Protocol):
    """What a program that was started with `exec` reports: its pid, then its exit code."""

    async def line(self) -> dict[str, Any]:
        """Wait for the next report; it is empty if there are no more."""

    def close(self) -> None: ...


class ContainerRuntime(Protocol):
    """Starts containers, finds them again after a restart of the agent, and calls `on_end` when one has ended."""

    async def open(self) -> None:
        """Prepare, so that the first pod does not wait for it."""

    async def close(self) -> None:
        """Stop following containers. They go on."""

    async def start(self, container: RunningContainer, spec: Mapping[str, Any]) -> None:
        """Run a container. Returns when its program has been executed, or raises ContainerFailed."""

    def find(self, container: RunningContainer) -> bool:
        """Follow a container that an earlier agent started, or read how it ended. Returns False if it was never
        started. Raises OSError if that cannot be determined: a new attempt might run beside it."""

    def stop(self, container: RunningContainer) -> None:
        """Ask the container to end."""

    def kill(self, container: RunningContainer) -> None: ...

    async def exec(self, container: RunningContainer, request: Mapping[str, Any], streams: Sequence[int]) -> Reply:
        """Run one more program in a container, with three streams."""

    async def open_terminal(self, container: RunningContainer, owner: int) -> tuple[int, int]:
        """Return both sides of a new terminal in a container, the program's second."""
