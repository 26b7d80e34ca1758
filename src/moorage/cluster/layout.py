"""Where `moorage up` keeps things below its data directory.

Owns: the names of files and folders. Everything that must survive is under `api`, `pool` and `nodes`; `run` and `logs`
may be thrown away.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from moorage.errors import UsageError

_LONGEST_SOCKET = 107  # what the kernel takes


@dataclass(frozen=True)
class DataLayout:
    """The paths of one data directory."""

    root: Path

    @property
    def api(self) -> Path:
        return self.root / "api"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def api_socket(self) -> Path:
        return self.root / "run" / "api.sock"

    @property
    def pool(self) -> Path:
        return self.root / "pool"

    @property
    def pool_image(self) -> Path:
        return self.root / "pool.xfs"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def lock(self) -> Path:
        return self.root / "run" / "up.lock"

    @property
    def page_token(self) -> Path:
        """The file with the key to the live page."""
        return self.root / "page-token"

    @property
    def record(self) -> Path:
        return self.root / "cluster.json"

    def node(self, name: str) -> Path:
        """The root directory of a node's agent, as the kubelet's."""
        return self.root / "nodes" / name

    def csi_socket(self, name: str) -> Path:
        """The socket of the plugin on a node."""
        return self.root / "run" / f"{name}.sock"

    def log(self, part: str) -> Path:
        return self.logs / f"{part}.log"

    def check_safe(self) -> None:
        """Raise UsageError if another user owns the data directory, or may write to it: it holds keys, as root."""
        try:
            found = self.root.stat()
        except FileNotFoundError:
            return
        if not self.root.is_dir():
            raise UsageError(f"--data-dir {self.root} is not a directory")
        if found.st_uid != os.geteuid():
            raise UsageError(f"--data-dir {self.root} belongs to another user (uid {found.st_uid}); give another one")
        if found.st_mode & 0o022:
            raise UsageError(f"--data-dir {self.root} can be written by others; give another one, or chmod go-w it")

    def make(self) -> None:
        """Create the folders; they are for their owner only."""
        for folder in (self.root, self.api, self.logs, self.run):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.api, self.logs, self.run):
            folder.chmod(0o700)  # an earlier version may have made it

    def longest_socket(self, nodes: list[str]) -> Path | None:
        """A socket whose path is too long for the kernel, if there is one."""
        registration = [self.node(name) / "plugins_registry" / "csi.moorage.dev-reg.sock" for name in nodes]
        sockets = [self.api_socket, *(self.csi_socket(name) for name in nodes), *registration]
        too_long = [path for path in sockets if len(str(path)) > _LONGEST_SOCKET]
        return max(too_long, key=lambda path: len(str(path))) if too_long else None
