"""`moorage up`, put together: API server and controllers here, each node and each plugin in a process of its own.

Owns: which parts there are, the order in which they start and stop, and what is ready when.
Decides nothing about volumes. Open it first.
Start reading at: `Cluster.start`, `Cluster.stop`.
"""

import asyncio
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moorage.apiserver.run import ApiServer
from moorage.apiserver.run import Config as ApiServerConfig
from moorage.cluster import default_objects as defaults
from moorage.cluster.node_process import WorkerConfig
from moorage.cluster.pool import PoolReport, ensure_pool, release_pool
from moorage.cluster.settings import UpSettings
from moorage.cluster.supervisor import Part, ProcessSupervisor
from moorage.controllers import run as controllers
from moorage.errors import MoorageError, UsageError
from moorage.host.errors import host_error
from moorage.kube.api import config as kube_config
from moorage.kube.api.client import Client
from moorage.kube.control.events import Recorder
from moorage.kube.names import DRIVER_EXITED
from moorage.kube.objects import CSINode, Lease, Node, ObjectReference, seconds_of
from moorage.log import get_logger
from moorage.ui.access import kept_token
from moorage.ui.run import PREFERRED_PORT, link, listening

log = get_logger(__name__)

_READY_TIMEOUT_S = 60.0
_PAGE = "page"


class StartTimeout(MoorageError):
    """A part did not come up in time; the message names it and its log."""

    code = "UNAVAILABLE"


@dataclass
class StartReport:
    """What was started, for a person to read."""

    kubeconfig: Path
    url: str
    nodes: list[str]
    driver: str
    pool: PoolReport | None
    made: list[str] = field(default_factory=list)
    seconds: float = 0.0
    page: str = ""  # the link to the live page, if there is one


class Cluster:
    """One running stack. `start` returns when a pod with a volume could run; `stop` leaves nothing mounted."""

    def __init__(self, settings: UpSettings) -> None:
        self.settings = settings
        self.layout = settings.layout
        self.supervisor = ProcessSupervisor(self._part_changed)
        self._recorder: Recorder | None = None
        self.server: ApiServer | None = None
        self._lock = -1
        self._page: socket.socket | None = None
        self._pool: asyncio.Task[PoolReport] | None = None

    async def start(self) -> StartReport:
        began, since = time.monotonic(), time.time()
        self._take_directory()
        pool = None
        if not self.settings.driver:
            making = asyncio.to_thread(ensure_pool, self.layout, self.settings.pool, self.settings.pool_size_bytes)
            self._pool = asyncio.create_task(making, name="pool")
            pool = await asyncio.shield(self._pool)
        for name in self.settings.node_names:
            self._start_driver(name, pool)
        await self._start_server()
        self.supervisor.start(Part("controllers", coroutine=self._run_controllers))
        for name in self.settings.node_names:
            self._start_worker(name, pool)
        driver, attaches = await self._driver_facts()
        async with self.client() as client:
            objects = defaults.default_objects(driver, attaches=attaches, is_ours=not self.settings.driver)
            made = await defaults.ensure(client, objects)
            await self._wait_ready(client, driver, since)
        assert self.server is not None
        return StartReport(
            self.layout.kubeconfig,
            self.server.url,
            self.settings.node_names,
            driver,
            pool,
            made,
            time.monotonic() - began,
            self._start_page(),
        )

    def _take_directory(self) -> None:
        """Create the data directory, or continue with it. Nothing in it is touched if it is not ours, or in use."""
        root = self.layout.root
        try:
            self.layout.check_safe()
            self.layout.make()
            self._lock = _locked(self.layout.lock)
            self.settings = self.settings.continuing()
        except OSError as failed:
            self._unlock()
            raise host_error("use the data directory", failed.filename or root, failed) from failed
        except UsageError:
            self._unlock()
            raise

    async def stop(self) -> None:
        """Pods end, volumes are unmounted, then the driver stops, then the API server; nothing is lost.

        Does nothing if `start` did not get the data directory: everything in it belongs to another cluster then.
        """
        if not self.owns_data:
            return
        nodes = self.settings.node_names
        await self.supervisor.stop([_PAGE])
        if self._page is not None:
            self._page.close()
        await asyncio.gather(*(self.supervisor.stop([_worker(name)]) for name in nodes))
        await asyncio.gather(*(self.supervisor.stop([_driver(name)]) for name in nodes))
        await self.supervisor.stop(["controllers"])
        if self.server is not None:
            await self.server.stop()
        if self._pool is not None:  # a thread goes on when its caller is cancelled
            await asyncio.wait([self._pool])
        await asyncio.to_thread(release_pool, self.layout)
        self._unlock()

    @property
    def owns_data(self) -> bool:
        """Whether the data directory is this cluster's: it was free, and holds nothing of another shape."""
        return self._lock >= 0

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def client(self) -> Client:
        """A client of this cluster's API server, over its socket."""
        return Client(kube_config.from_kubeconfig(self._internal_kubeconfig), identity="moorage-up")

    @property
    def _internal_kubeconfig(self) -> Path:
        return self.layout.run / "internal.kubeconfig"

    async def _start_server(self) -> None:
        config = ApiServerConfig(
            data_dir=self.layout.api,
            port=self.settings.port,
            unix_socket=self.layout.api_socket,
            kubeconfig=self.layout.kubeconfig,
        )
        self.server = ApiServer(config)
        await self.server.start()
        _write_kubeconfig(self._internal_kubeconfig, self.layout.api_socket, self.server.token)

    async def _run_controllers(self) -> None:
        async with (
            Client(kube_config.from_kubeconfig(self._internal_kubeconfig), identity="moorage-controllers") as client,
            Recorder(client, "moorage-up") as self._recorder,
        ):
            await controllers.run(client, controllers.ControllerSettings(names=tuple(controllers.CONTROLLERS)))

    def _part_changed(self, part: Part) -> None:
        """Record that a driver has crashed, as an event about its node. Its uid is its name, as a kubelet writes it."""
        node = next((name for name in self.settings.node_names if _driver(name) == part.name), None)
        if node is not None and part.state == "restarting" and self._recorder is not None:
            about = ObjectReference(api_version="v1", kind="Node", name=node, uid=node)
            self._recorder.warning(about, DRIVER_EXITED, part.last_failure)

    def _start_driver(self, node: str, pool: PoolReport | None) -> None:
        if self.settings.has_foreign_socket:
            return
        endpoint = f"unix://{self.layout.csi_socket(node)}"
        if self.settings.driver:
            words = [word.format(endpoint=endpoint, node=node) for word in shlex.split(self.settings.driver)]
        else:
            assert pool is not None
            scope = "shared" if self.settings.is_shared else "node"
            words = [sys.executable, "-m", "moorage.cli.main", "--log-level", self.settings.log_level, "plugin"]
            words += ["--endpoint", endpoint, "--node-id", node, "--pool", str(pool.path), "--scope", scope]
            words += ["--kubelet-dir", str(self.layout.node(node)), "--stop-grace", "20s", *self.settings.plugin_flags]
        name = _driver(node)
        self.supervisor.start(Part(name, command=words, log_file=self.layout.log(name), stop_grace_s=25.0))

    def _start_worker(self, node: str, pool: PoolReport | None) -> None:
        assert self.server is not None
        is_first = node == self.settings.node_names[0]
        config = WorkerConfig(
            node=node,
            root=str(self.layout.node(node)),
            kubeconfig=str(self._internal_kubeconfig),
            csi_socket=str(self._socket(node)),
            roles=[] if is_first else ["registrar"],
            hide=[str(self.layout.root), *([str(pool.path)] if pool is not None else [])],
            client_ca=str(self.server.identity.ca),
            log_level=self.settings.log_level,
        )
        command = [sys.executable, "-m", "moorage.cluster.node_process", msgspec.json.encode(config).decode()]
        name = _worker(node)
        self.supervisor.start(Part(name, command=command, log_file=self.layout.log(name), stop_grace_s=60.0))

    def _start_page(self) -> str:
        """Start the live page in a process of its own. Returns the link to it; empty if none is wanted."""
        if self.settings.page_port is None:
            return ""
        wanted = self.settings.page_port
        sock = listening("127.0.0.1", *((wanted,) if wanted else (PREFERRED_PORT, 0)))
        self._page = sock  # ours as long as we run: a browser that comes early, or while the page restarts, waits
        words = [sys.executable, "-m", "moorage.cli.main", "ui", "--listen-fd", str(sock.fileno())]
        words += ["--kubeconfig", str(self.layout.kubeconfig), "--logs", str(self.layout.logs)]
        words += ["--token-file", str(self.layout.page_token)]
        token = kept_token(self.layout.page_token)
        log_file, fds = self.layout.log(_PAGE), (sock.fileno(),)
        self.supervisor.start(Part(_PAGE, command=words, log_file=log_file, pass_fds=fds, stop_grace_s=5.0))
        return link("127.0.0.1", sock.getsockname()[1], token, is_tls=False)

    def _socket(self, node: str) -> Path:
        if self.settings.has_foreign_socket:
            return Path(self.settings.driver.removeprefix("unix://"))
        return self.layout.csi_socket(node)

    async def _driver_facts(self) -> tuple[str, bool]:
        """The driver's name, and whether it needs attaching; a foreign one is asked."""
        if not self.settings.driver:
            return defaults.DRIVER, self.settings.is_shared
        node = self.settings.node_names[0]
        try:
            return await _ask_driver(self._socket(node), _READY_TIMEOUT_S)
        except MoorageError as error:
            part = self.supervisor.parts.get(_driver(node))
            why = f" ({part.last_failure})" if part is not None and part.last_failure else ""
            raise StartTimeout(f"the driver of {node} does not answer{why}: {error}") from error

    async def _wait_ready(self, client: Client, driver: str, since: float) -> None:
        """Every node reporting since `since` that it is ready, and the driver known on each."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        waiting = set(self.settings.node_names)
        while waiting:
            leases = (await client.list(Lease, "kube-node-lease")).items
            alive = {lease.name for lease in leases if (seconds_of(lease.spec.renew_time) or 0.0) >= since}
            nodes = {node.name for node in (await client.list(Node)).items if node.is_ready} & alive
            known = {
                one.name
                for one in (await client.list(CSINode)).items
                if any(entry.name == driver for entry in one.spec.drivers)
            }
            waiting -= nodes & known
            if waiting and time.monotonic() > deadline:
                first = sorted(waiting)[0]
                raise StartTimeout(
                    f"{first} is not ready after {_READY_TIMEOUT_S:.0f} s; see {self.layout.log(_worker(first))}"
                )
            if waiting:
                await asyncio.sleep(0.02)


def _worker(node: str) -> str:
    return f"{node}-agent"


def _driver(node: str) -> str:
    return f"{node}-driver"


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise UsageError(
            f"another `moorage up` (process {holder}) runs on {path.parent.parent}; stop it, or give another --data-dir"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _write_kubeconfig(path: Path, socket: Path, token: str) -> None:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "internal",
        "clusters": [{"name": "internal", "cluster": {"server": f"unix://{socket}"}}],
        "users": [{"name": "internal", "user": {"token": token}}],
        "contexts": [{"name": "internal", "context": {"cluster": "internal", "user": "internal"}}],
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(document, file)


async def _ask_driver(socket: Path, timeout_s: float) -> tuple[str, bool]:
    """Ask a driver for its name, and whether its volumes are attached to nodes."""
    # Only `--driver` needs gRPC, which is half of the memory of this process.
    from moorage.csi import csi_pb2 as pb
    from moorage.csi.capabilities import read_capabilities
    from moorage.csi.client import CsiClient
    from moorage.csi.errors import CsiError

    async with CsiClient(f"unix://{socket}", timeout_s=10) as client:
        try:
            await client.wait_ready(timeout_s)
        except TimeoutError as error:
            raise CsiError("Probe", "UNAVAILABLE", f"not ready within {timeout_s:.0f} s") from error
        info = await client.GetPluginInfo(pb.GetPluginInfoRequest())
        return info.name, (await read_capabilities(client)).attaches
