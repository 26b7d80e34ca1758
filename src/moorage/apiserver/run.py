"""The server, put together.

Owns: which parts there are, in which order they start and stop. It decides nothing. Open it first.
Start reading at: `ApiServer.start`.
"""

import asyncio
import fcntl
import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moorage.apiserver.access.authentication import Authenticator
from moorage.apiserver.access.authorization import Authorizer
from moorage.apiserver.access.default_roles import default_bindings, default_roles
from moorage.apiserver.access.node_tls import NodeTls
from moorage.apiserver.access.pki import ServerIdentity, known_identity, make_apart, write_private
from moorage.apiserver.access.rbac import GROUP as RBAC_GROUP
from moorage.apiserver.access.rbac import RbacIndex
from moorage.apiserver.crd.definitions import Definitions
from moorage.apiserver.documents.endpoints import Pages
from moorage.apiserver.documents.metrics import ServerMetrics
from moorage.apiserver.handlers.node_proxy import KubeletProxy
from moorage.apiserver.handlers.objects import ObjectHandler
from moorage.apiserver.handlers.pods import PodVerbs
from moorage.apiserver.handlers.reviews import Reviews
from moorage.apiserver.http.edge import Edge, Handlers
from moorage.apiserver.http.listen import Listener
from moorage.apiserver.kinds.event_kinds import newer_kind
from moorage.apiserver.kinds.registry import KindRegistry, Object, builtin_kinds
from moorage.apiserver.kinds.snapshot_crds import snapshot_definitions
from moorage.apiserver.limits import ServerLimits
from moorage.apiserver.request.options import Call, Options
from moorage.apiserver.store.store import Store
from moorage.apiserver.upkeep.housekeeping import AGENT, Housekeeper
from moorage.apiserver.upkeep.quotas import QuotaCounter
from moorage.apiserver.writing.operations import Operations
from moorage.errors import UsageError
from moorage.log import get_logger

log = get_logger(__name__)

NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")


@dataclass(frozen=True, slots=True)
class Config:
    """Where the server keeps its data and where it listens."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    insecure_port: int | None = None  # plain HTTP on loopback, still with the token; for tests and debugging
    unix_socket: Path | None = None
    allow_remote: bool = False
    kubeconfig: Path | None = None
    in_memory: bool = False
    collects_garbage: bool = True
    enforces_rbac: bool = True  # False: every authenticated user may do everything
    makes_keys_apart: bool = False  # in another process, where idle memory matters more than the first start
    limits: ServerLimits = field(default_factory=ServerLimits)


class ApiServer:
    """One running server; `start` returns when it answers, `stop` when everything is on disk."""

    def __init__(self, config: Config) -> None:
        _check(config)
        self.config = config
        self.url = ""
        self.insecure_url = ""
        self._lock = -1
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def token(self) -> str:
        return self.identity.token

    @property
    def kubeconfig(self) -> Path:
        return self.config.kubeconfig or self.config.data_dir / "kubeconfig"

    async def start(self) -> None:
        config = self.config
        config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _locked(config.data_dir)
        self.identity, is_whole = known_identity(config.data_dir, (config.host,))
        making = None if is_whole else asyncio.create_task(self._make_keys(), name="apiserver-keys")
        self.store = Store(None if config.in_memory else config.data_dir / "state.db")
        self.store.start()
        self.registry = KindRegistry(builtin_kinds())
        core_events = self.registry.find("", "v1", "events")
        assert core_events is not None
        self.registry.add(newer_kind(core_events))
        self.resources = Operations(self.store, self.registry)
        if making is not None:
            await making
        authenticator = Authenticator(self.identity, self.store)
        definitions = Definitions(self.store, self.registry)
        self.authorizer = Authorizer(RbacIndex(self.store), config.enforces_rbac)
        self.metrics = ServerMetrics()
        handlers = Handlers(
            KubeletProxy(self.store, NodeTls(self.identity.node_client, self.identity.ca)),
            (PodVerbs(self.resources, self.registry), Reviews(self.store, authenticator, self.authorizer)),
            ObjectHandler(self.resources),
            Pages(self.registry, self.store, self.metrics),
        )
        access = (authenticator, self.authorizer)
        self.edge = Edge(self.registry, access, handlers, config.limits, self.metrics)
        await self._create_defaults()
        keeper = Housekeeper(self.resources, self.registry, self.identity.ca.read_text(), config.collects_garbage)
        keeper.chores.append(definitions.empty_orphans)
        self._tasks.append(asyncio.create_task(keeper.run(), name="apiserver-housekeeping"))
        self._tasks.append(asyncio.create_task(QuotaCounter(self.store).run(), name="apiserver-quotas"))
        self.listener = Listener(self.edge.handle, config.limits)
        port = await self.listener.open_tls(config.host, config.port, self.identity)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"https://{host}:{port}"
        if config.insecure_port is not None:
            plain = await self.listener.open_plain("127.0.0.1", config.insecure_port)
            self.insecure_url = f"http://127.0.0.1:{plain}"
        if config.unix_socket is not None:
            await self.listener.open_unix(config.unix_socket)
        write_private(self.kubeconfig, kubeconfig_of(self.url, self.identity))
        log.info("serving", url=self.url, kubeconfig=self.kubeconfig, revision=self.store.revision)

    async def stop(self) -> None:
        self.edge.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.listener.close()
        await self.resources.close()
        await self.store.close()
        os.close(self._lock)

    async def _make_keys(self) -> None:
        if self.config.makes_keys_apart:
            await make_apart(self.identity, (self.config.host,))
            return
        from moorage.apiserver.access import certs

        certs.make_missing(self.identity, (self.config.host,))

    async def _create_defaults(self) -> None:
        """Create what every cluster has and is missing here; an object that was changed stays as it is."""
        namespaces: list[Object] = [{"metadata": {"name": name}} for name in NAMESPACES]
        await self._create_missing("", "v1", "namespaces", namespaces)
        await asyncio.gather(
            self._create_missing("apiextensions.k8s.io", "v1", "customresourcedefinitions", snapshot_definitions()),
            self._create_missing(RBAC_GROUP, "v1", "clusterroles", default_roles()),
            self._create_missing(RBAC_GROUP, "v1", "clusterrolebindings", default_bindings()),
        )

    async def _create_missing(self, group: str, version: str, plural: str, objects: list[Object]) -> None:
        kind = self.registry.find(group, version, plural)
        assert kind is not None
        missing = [obj for obj in objects if self.store.get(kind.stored_as, "", obj["metadata"]["name"]) is None]
        call = Call(kind, "", "", "", Options(), user_agent=AGENT)
        await asyncio.gather(*(self.resources.create(call, obj) for obj in missing))


def _check(config: Config) -> None:
    """Refuse an address that others can reach, unless that was asked for."""
    try:
        is_local = ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        is_local = config.host == "localhost"
    if not is_local and not config.allow_remote:
        raise UsageError(f"{config.host} is not a loopback address; --allow-remote serves other machines too")


def _locked(data_dir: Path) -> int:
    """Hold the directory for this process; a second server on it is refused."""
    descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise UsageError(f"{data_dir} is in use by another API server") from error
    return descriptor


def kubeconfig_of(url: str, identity: ServerIdentity) -> bytes:
    """A kubeconfig for the administrator, as JSON, which is YAML too."""
    import base64

    def inline(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "moorage",
        "clusters": [
            {"name": "moorage", "cluster": {"server": url, "certificate-authority-data": inline(identity.ca)}}
        ],
        "users": [
            {
                "name": "moorage-admin",
                "user": {
                    "token": identity.token,
                    "client-certificate-data": inline(identity.admin[0]),
                    "client-key-data": inline(identity.admin[1]),
                },
            }
        ],
        "contexts": [{"name": "moorage", "context": {"cluster": "moorage", "user": "moorage-admin"}}],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
