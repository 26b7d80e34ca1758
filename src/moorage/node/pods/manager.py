"""All pods of this node: one worker each, woken when something about its pod changed.

Owns: the workers and their tasks, and taking up what an earlier agent left.
Decides nothing: see `worker.py` and `lifecycle.py`. Start reading at: `PodManager.run`.
"""

import asyncio

from moorage.kube.names import MIRROR_POD
from moorage.kube.objects.pods import Pod
from moorage.log import get_logger
from moorage.node.layout import PodUid
from moorage.node.pods.cleanup import find_containers, pod_directories, remove_attempt
from moorage.node.pods.tools import Tools
from moorage.node.pods.worker import PodWorker
from moorage.node.runtime import RunningContainer
from moorage.node.safe_names import is_uid

log = get_logger(__name__)

SWEEP_S = 60.0

# The shadow of a pod that a kubelet reads from a file: nothing is run for it, but it can be deleted.


class PodManager:
    """Workers by pod UID."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.workers: dict[PodUid, PodWorker] = {}
        self._tasks: dict[PodUid, asyncio.Task[None]] = {}
        self._new: asyncio.Queue[PodWorker] = asyncio.Queue()
        self._has_begun = False
        self._is_draining = False

    def recover(self) -> None:
        """Take up containers that run or ended while no agent was there; their volumes are held."""
        for uid, by_name in find_containers(self._tools.layout).items():
            worker = self._worker(uid)
            worker.containers = by_name
            for name, attempts in by_name.items():
                by_name[name] = [container for container in attempts if self._take_up(container)]
            if any(one.is_running for attempts in by_name.values() for one in attempts):
                self._tools.volumes.hold(uid)

    def _take_up(self, container: RunningContainer) -> bool:
        """An attempt that was never started is no attempt: it counts neither as a restart nor as a failure."""
        if self._tools.runtime.find(container):
            return True
        try:
            remove_attempt(container)
        except OSError as error:
            log.warning("record of a start that never was is left", container=container.id, reason=str(error))
        return False

    def begin(self) -> None:
        """The pod list is complete: what was found on disk and is not in it has no pod any more."""
        self._has_begun = True
        for worker in self.workers.values():
            if worker.pod is None:
                worker.mark_deleted()
                log.info("pod directory without a pod", uid=worker.uid)
            self._new.put_nowait(worker)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """Called by the informer. An object recreated under the same name is another pod."""
        pod = new or old
        if pod is None:
            return
        uid = PodUid(pod.uid)
        if not is_uid(uid):  # it names directories
            log.error("pod is ignored, its uid is not valid", pod=pod.key, uid=uid)
            return
        is_new = uid not in self.workers
        if is_new and self._is_draining:
            return  # it is the next agent's, or orphaned: here it would be started and left running
        if is_new and (new is None or (MIRROR_POD in pod.annotations and not pod.is_deleting)):
            return
        worker = self._worker(uid)
        worker.pod = pod
        worker.is_gone = False
        if new is None:
            worker.mark_deleted()
        if is_new and self._has_begun:
            self._new.put_nowait(worker)
        if not (old and new and self._is_echo(old, new)):
            worker.wake()

    def _is_echo(self, old: Pod, new: Pod) -> bool:
        """Nothing but the status of a pod that runs has changed, and that was written here. What others did before is
        in it as well, and may not have been told of by itself."""
        return (
            new.status.phase == "Running"
            and self._tools.statuses.is_echo(new)
            and old.is_deleting == new.is_deleting
            and (old.spec, old.labels, old.annotations) == (new.spec, new.labels, new.annotations)
        )

    def container_ended(self, container: RunningContainer) -> None:
        worker = self.workers.get(PodUid(container.uid))
        if worker is not None:
            worker.wake()

    def volumes_moved(self, uid: PodUid) -> None:
        worker = self.workers.get(uid)
        if worker is not None:
            worker.wake()

    def find(self, namespace: str, name: str, uid: str = "") -> PodWorker | None:
        """The worker of a pod by its name. A recreated pod comes before one that is still being ended."""
        found = [
            worker
            for worker in self.workers.values()
            if (pod := worker.pod) is not None
            and (pod.namespace, pod.name) == (namespace, name)
            and uid in ("", pod.uid)
        ]
        return min(found, key=lambda worker: worker.is_gone, default=None)

    def sweep(self) -> None:
        """Take up directories that have come since: a driver may do late what it was asked for a pod that is gone."""
        for uid in pod_directories(self._tools.layout):
            if uid not in self.workers:
                log.warning("pod directory without a pod", uid=uid)
                worker = self._worker(uid)
                worker.mark_deleted()
                self._new.put_nowait(worker)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self.sweep()
                await self._tools.volumes.sweep()
            except OSError as error:
                log.warning("directories cannot be looked through", reason=str(error))
            except Exception:  # the next look may go better
                log.exception("looking through directories failed unexpectedly")

    async def run(self) -> None:
        """Until cancelled; containers go on then."""
        sweeping = asyncio.create_task(self._sweep_forever(), name="orphaned directories")
        try:
            while True:
                self._start(await self._new.get())
                # What is under way goes before what is new: of hundreds of pods that come at once the first have their
                # volumes while the last are being looked at, and the driver is at work from the beginning.
                await asyncio.sleep(0)
        finally:
            tasks = [sweeping, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, worker: PodWorker) -> None:
        self._tasks[worker.uid] = asyncio.create_task(self._attend(worker), name=f"pod {worker.uid}")

    @property
    def is_running(self) -> bool:
        """Whether a process of any pod runs here."""
        of_all = (attempts for worker in self.workers.values() for attempts in worker.containers.values())
        return any(container.is_running for attempts in of_all for container in attempts)

    async def drain(self, timeout_s: float) -> bool:
        """Stop every pod and unmount its volumes, leaving the objects alone; False when time ran out. Pods that come
        from now on are not taken up."""
        self._is_draining = True
        while not self._new.empty():
            self._start(self._new.get_nowait())
        for worker in self.workers.values():
            worker.is_draining = True
            worker.wake()
        tasks = [task for task in self._tasks.values() if not task.done()]
        if not tasks:
            return True
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            log.warning("pod was not stopped in time", task=task.get_name())
        return not late

    def hurry(self) -> None:
        """Kill what is being drained: no container has any grace left."""
        for worker in self.workers.values():
            worker.is_hurried = True
            worker.wake()

    def _worker(self, uid: PodUid) -> PodWorker:
        worker = self.workers.get(uid)
        if worker is None:
            worker = self.workers[uid] = PodWorker(self._tools, uid)
        return worker

    async def _attend(self, worker: PodWorker) -> None:
        while True:
            try:
                await worker.run()
                break
            except Exception:
                log.exception("pod worker failed; it goes on", uid=worker.uid)
                await asyncio.sleep(5)
        if not worker.is_draining:
            self.workers.pop(worker.uid, None)
            self._tasks.pop(worker.uid, None)
