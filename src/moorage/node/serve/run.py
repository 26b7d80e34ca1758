"""The endpoint that the API server and monitoring talk to.

Owns: routes, and who may use them. Start reading at: `Endpoint`.
"""

import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

import prometheus_client
from aiohttp import web
from aiohttp.typedefs import Handler

from moorage.csi.pending import in_flight_text
from moorage.errors import InvalidRequest, MoorageError
from moorage.kube.api.client import Client
from moorage.kube.objects.meta import as_document
from moorage.kube.objects.pods import PodSpec
from moorage.log import get_logger
from moorage.node.config import AgentConfig
from moorage.node.layout import NodeLayout
from moorage.node.pods.manager import PodManager
from moorage.node.pods.status_writer import StatusWriter
from moorage.node.runtime import ContainerRuntime, RunningContainer
from moorage.node.runtime.container_state import read_spec
from moorage.node.serve import metrics as figures
from moorage.node.serve.auth import Gate, authority_of, published_certificate, server_context
from moorage.node.serve.exec import ExecOptions, refused, serve_exec
from moorage.node.serve.logs import is_yes, log_options_from, stream
from moorage.node.volumes.stats import VolumeStats

log = get_logger(__name__)

_STOP_S = 1.0
_STATUSES = ("initContainerStatuses", "containerStatuses")


class Endpoint:
    """HTTPS on loopback. Use as `async with`; `port` is known inside."""

    def __init__(
        self,
        pods: PodManager,
        statuses: StatusWriter,
        runtime: ContainerRuntime,
        stats: VolumeStats,
        config: AgentConfig,
        client: Client,
    ) -> None:
        self.port = config.port
        self._pods = pods
        self._statuses = statuses
        self._runtime = runtime
        self._stats = stats
        self._config = config
        self._gate = Gate(config.api, client, config.node_name)
        self._runner: web.AppRunner | None = None
        self.certificate = ""

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._checked])
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/pods", self._list_pods),
                web.get("/stats/summary", self._summary),
                web.get("/metrics", self._metrics),
                web.get("/containerLogs/{namespace}/{pod}/{container}", self._logs),
                web.route("*", "/exec/{namespace}/{pod}/{container}", self._exec),
                web.route("*", "/exec/{namespace}/{pod}/{uid}/{container}", self._exec),
                web.route("*", "/attach/{rest:.*}", self._unsupported),
                web.route("*", "/portForward/{rest:.*}", self._unsupported),
                web.route("*", "/run/{rest:.*}", self._unsupported),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S, handler_cancellation=True)
        await self._runner.setup()
        config = self._config
        authority = authority_of(config.api, config.client_ca)
        directory = NodeLayout(config.root).run
        tls = server_context(directory, config.node_name, config.address, authority)
        self.certificate = published_certificate(directory)
        await self._listen(self._runner, tls)
        return self

    async def _listen(self, runner: web.AppRunner, tls: ssl.SSLContext) -> None:
        """On the port that was asked for; without one, on that of the agent before, which clients may still know."""
        config = self._config
        remembered = NodeLayout(config.root).run / "port"
        wanted = config.port or _port_in(remembered)
        try:
            await web.TCPSite(runner, config.address, wanted, ssl_context=tls).start()
        except OSError as error:
            if config.port or not wanted:
                raise MoorageError(f"cannot listen on {config.address}:{wanted}: {error.strerror or error}") from error
            log.info("port of the agent before is taken; another is used", port=wanted, reason=str(error))
            await web.TCPSite(runner, config.address, 0, ssl_context=tls).start()
        self.port = int(runner.addresses[0][1])
        try:
            remembered.write_text(f"{self.port}\n")
        except OSError as error:
            log.warning("port is not remembered", path=str(remembered), reason=str(error))

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/healthz":
            refusal = await self._gate.refusal(request)
            if refusal is not None:
                return refusal
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _list_pods(self, _request: web.Request) -> web.Response:
        items = [as_document(worker.pod) for worker in self._pods.workers.values() if worker.pod is not None]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})

    async def _summary(self, _request: web.Request) -> web.Response:
        usages = await self._stats.read()
        return web.json_response(figures.summary(self._config.node_name, usages))

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = prometheus_client.generate_latest().decode() + figures.prometheus(await self._stats.read())
        text += in_flight_text(self._stats.calls_in_flight())
        return web.Response(text=text, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        try:
            options = log_options_from(request.query, time.time())
        except InvalidRequest as error:
            return web.Response(status=422, text=str(error))
        container = self._container(request, previous=_flag(request, "previous"))
        if isinstance(container, str):
            return web.Response(status=400, text=container)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        try:
            async with aclosing(stream(container.log, options, lambda: container.is_running)) as pieces:
                async for piece in pieces:
                    await response.write(piece)
            await response.write_eof()
        except ConnectionError:
            log.debug("reader of a log went away", container=container.id)
        return response

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        container = self._container(request, previous=False)
        if isinstance(container, str) or not container.is_running:
            text = container if isinstance(container, str) else f"container {container.name} is not running"
            return refused(400, text)
        argv = tuple(request.query.getall("command", []))
        if not argv:
            return refused(400, "you must specify at least one command for the container")
        options = ExecOptions(
            argv,
            stdin=_flag(request, "stdin") or _flag(request, "input"),
            stdout=_flag(request, "stdout") or _flag(request, "output"),
            stderr=_flag(request, "stderr") or _flag(request, "error"),
            tty=_flag(request, "tty"),
        )
        return await serve_exec(request, self._runtime, container, read_spec(container.directory), options)

    async def _unsupported(self, request: web.Request) -> web.Response:
        what = Path(request.path).parts[1]
        return refused(501, f"{what} is not served by this node agent; exec and logs are")

    def _container(self, request: web.Request, *, previous: bool) -> RunningContainer | str:
        """The container that a request means, or why there is none, in the words that kubectl's users know."""
        namespace, name = request.match_info["namespace"], request.match_info["pod"]
        wanted = request.match_info["container"]
        worker = self._pods.find(namespace, name, request.match_info.get("uid", ""))
        if worker is None:
            return f'pod "{namespace}/{name}" is not on this node'
        spec = worker.pod.spec if worker.pod is not None else PodSpec()
        if all(wanted != one.name for one in (*spec.containers, *spec.init_containers)):
            return f'container "{wanted}" in pod "{name}" is not available'
        attempts = worker.containers.get(wanted) or []
        status = _status_named(self._statuses.last(worker.uid), wanted)
        if previous:
            return _previous(attempts, status) or f'previous terminated container "{wanted}" in pod "{name}" not found'
        if attempts:
            return attempts[-1]
        reason = ((status.get("state") or {}).get("waiting") or {}).get("reason") or "ContainerCreating"
        why = "image can't be pulled" if reason == "ErrImagePull" else reason
        return f'container "{wanted}" in pod "{name}" is waiting to start: {why}'


def _status_named(status: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """The status of one container as it was last told to the cluster."""
    every = [one for part in _STATUSES for one in (status or {}).get(part) or ()]
    found: Mapping[str, Any] = next((one for one in every if one["name"] == name), {})
    return found


def _previous(attempts: Sequence[RunningContainer], status: Mapping[str, Any]) -> RunningContainer | None:
    """The attempt that the status gives as the last state: while the next one is awaited, that is the newest."""
    if not status:  # an agent started a moment ago has said nothing yet
        return attempts[-2] if len(attempts) > 1 else None
    last = ((status.get("lastState") or {}).get("terminated") or {}).get("containerID", "")
    return next((one for one in attempts if last == f"moorage://{one.id}"), None)


def _port_in(path: Path) -> int:
    """A port that was remembered, or 0."""
    try:
        port = int(path.read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 1 << 16 else 0


def _flag(request: web.Request, name: str) -> bool:
    return is_yes(request.query.get(name, ""))
