"""What the attach/detach controller costs at rest, and how soon it reacts to one new pod.

    python benchmarks/controllers_attachdetach.py [--nodes 5000] [--attachments 50000] [--seconds 20]

The controller runs whole, over real informers; only the HTTP requests are answered in this process. At rest every node
reports its status every five minutes, as kubelets do. Printed are the share of one core, the milliseconds from the
watch event of a pod to the request that makes its VolumeAttachment, and each against the limit (1 %, 10 ms), also for a
tenth of the objects: the growth factor should stay near 1.
"""

import argparse
import asyncio
import resource
import statistics
import time
from typing import Any

from figures import record

from moorage.controllers.attachdetach.run import run
from moorage.controllers.attachdetach.state import attachment_of
from moorage.controllers.context import Activity, ControllerContext
from moorage.kube.api.client import WatchEvent
from moorage.kube.cache.informer import Informer
from moorage.kube.names import MANAGED_ATTACH
from moorage.kube.objects.core import AttachedVolume, Node, NodeStatus
from moorage.kube.objects.meta import Condition, Meta, ObjectReference
from moorage.kube.objects.pods import ClaimVolumeSource, Pod, PodSpec, PodVolume
from moorage.kube.objects.storage import (
    AttachmentSource,
    AttachmentSpec,
    AttachmentStatus,
    CSIDriver,
    VolumeAttachment,
)
from moorage.kube.objects.volumes import (
    ClaimSpec,
    ClaimStatus,
    CsiVolumeSource,
    PersistentVolume,
    PersistentVolumeClaim,
    VolumeSpec,
)
from moorage.kube.volumes import NodeName, csi_volume_name

DRIVER = "csi.example.com"
REPORT_PERIOD_S = 300.0


class Cluster:
    """Informers that are filled here, and a client that answers at once."""

    def __init__(self) -> None:
        self.revision = 0
        self.informers: dict[type, Informer[Any]] = {}
        self.created: asyncio.Future[float] | None = None

    def of(self, kind: type) -> Informer[Any]:
        if kind not in self.informers:
            self.informers[kind] = Informer(None, kind)  # type: ignore[arg-type,type-var]
        return self.informers[kind]

    def remember(self, obj: Any) -> None:
        self.of(type(obj)).remember(obj)

    def meta(self, name: str, namespace: str = "") -> Meta:
        self.revision += 1
        annotations = {MANAGED_ATTACH: "true"}
        return Meta(
            name=name,
            namespace=namespace,
            uid=f"uid-{name}",
            resource_version=str(self.revision),
            annotations=annotations,
        )

    def fill(self, kind: type, objects: list[Any]) -> None:
        self.of(kind)._replace({obj.key: obj for obj in objects}, self.revision)

    def tell(self, obj: Any) -> None:
        self.of(type(obj))._take(WatchEvent("MODIFIED", obj))

    async def create(self, kind: type, body: dict[str, Any], *_: Any, **__: Any) -> Any:
        if self.created is not None and not self.created.done():
            self.created.set_result(time.perf_counter())
        return kind(metadata=self.meta(body["metadata"]["name"]))

    async def patch(self, kind: type, name: str, patch: dict[str, Any], *_: Any, **__: Any) -> Any:
        return node(self, name, [entry["name"] for entry in patch["status"]["volumesAttached"]])

    async def event(self, *_: Any) -> "Cluster":
        return self

    def normal(self, *_: Any) -> None: ...

    def warning(self, *_: Any) -> None: ...


def node(cluster: Cluster, name: str, attached: list[str]) -> Node:
    status = NodeStatus(
        conditions=[Condition(type="Ready", status="True")],
        volumes_attached=[AttachedVolume(name=volume) for volume in attached],
        volumes_in_use=attached,
    )
    return Node(metadata=cluster.meta(name), status=status)


def pod(cluster: Cluster, number: int, on: str) -> Pod:
    volume = PodVolume(name="v", persistent_volume_claim=ClaimVolumeSource(claim_name=f"claim-{number}"))
    return Pod(metadata=cluster.meta(f"pod-{number}", "default"), spec=PodSpec(node_name=on, volumes=[volume]))


def populate(cluster: Cluster, nodes: int, attachments: int, spare: int) -> None:
    """`attachments` volumes in use on `nodes` nodes, and `spare` claims whose pods are still to come."""
    pvs, claims, pods, objects = [], [], [], []
    per_node: dict[str, list[str]] = {f"node-{n}": [] for n in range(nodes)}
    for number in range(attachments + spare):
        csi = CsiVolumeSource(driver=DRIVER, volume_handle=f"handle-{number}")
        claim = PersistentVolumeClaim(
            metadata=cluster.meta(f"claim-{number}", "default"),
            spec=ClaimSpec(volume_name=f"pv-{number}"),
            status=ClaimStatus(phase="Bound"),
        )
        ref = ObjectReference(namespace="default", name=claim.name, uid=claim.uid)
        spec = VolumeSpec(csi=csi, access_modes=["ReadWriteOnce"], claim_ref=ref)
        pvs.append(PersistentVolume(metadata=cluster.meta(f"pv-{number}"), spec=spec))
        claims.append(claim)
        if number < attachments:
            on = f"node-{number % nodes}"
            name = csi_volume_name(DRIVER, csi.volume_handle)
            per_node[on].append(name)
            pods.append(pod(cluster, number, on))
            attached = AttachmentSpec(
                attacher=DRIVER, node_name=on, source=AttachmentSource(persistent_volume_name=f"pv-{number}")
            )
            meta = cluster.meta(attachment_of(name, NodeName(on)))
            objects.append(VolumeAttachment(metadata=meta, spec=attached, status=AttachmentStatus(attached=True)))
    cluster.fill(Node, [node(cluster, name, volumes) for name, volumes in per_node.items()])
    for kind, found in ((PersistentVolume, pvs), (PersistentVolumeClaim, claims), (Pod, pods)):
        cluster.fill(kind, found)
    cluster.fill(VolumeAttachment, objects)
    cluster.fill(CSIDriver, [])


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def rest(cluster: Cluster, nodes: int, seconds: float) -> float:
    """The share of a core that the controller uses while nodes report and nothing else happens."""
    every_s = REPORT_PERIOD_S / nodes
    known = list(cluster.of(Node))
    volumes = {one.name: [entry.name for entry in one.status.volumes_attached] for one in known}
    begun, used, harness, turn = time.perf_counter(), cpu_s(), 0.0, 0
    while time.perf_counter() - begun < seconds:
        due = int((time.perf_counter() - begun) / every_s)
        while turn < due:
            at = time.thread_time()
            report = node(cluster, known[turn % nodes].name, volumes[known[turn % nodes].name])
            harness += time.thread_time() - at  # making the report is the kubelet's work, not the controller's
            cluster.tell(report)
            turn += 1
        await asyncio.sleep(max(every_s, 0.02))
    return (cpu_s() - used - harness) / (time.perf_counter() - begun)


async def reaction(cluster: Cluster, first: int, nodes: int, count: int) -> float:
    """The median milliseconds from a pod's watch event to the request that attaches its volume."""
    took = []
    for number in range(first, first + count):
        arrival = pod(cluster, number, f"node-{number % nodes}")
        cluster.created = asyncio.get_running_loop().create_future()
        at = time.perf_counter()
        cluster.tell(arrival)
        took.append((await asyncio.wait_for(cluster.created, 10) - at) * 1000)
        await asyncio.sleep(0.01)
    return statistics.median(took)


async def measure(nodes: int, attachments: int, seconds: float, pods: int = 50) -> tuple[float, float, float]:
    cluster = Cluster()
    populate(cluster, nodes, attachments, pods)
    activity = Activity()
    recorders: Any = type("Recorders", (), {"of": staticmethod(cluster.event)})
    context = ControllerContext(cluster, cluster, recorders, activity)  # type: ignore[arg-type]
    begun = time.perf_counter()
    task = asyncio.create_task(run(context))
    await asyncio.sleep(0)
    while not activity.is_idle:
        await asyncio.sleep(0.001)
    started_s = time.perf_counter() - begun
    share = await rest(cluster, nodes, seconds)
    milliseconds = await reaction(cluster, attachments, nodes, pods)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return started_s, share, milliseconds


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--attachments", type=int, default=50000)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    small = await measure(args.nodes // 10, args.attachments // 10, args.seconds / 4)
    started_s, share, milliseconds = await measure(args.nodes, args.attachments, args.seconds)
    print(f"{args.nodes} nodes, {args.attachments} attachments; rebuilt after a start in {started_s:.2f} s")
    record("attach/detach controller at rest with 50,000 attachments", f"{share * 100:.2f} %", share <= 0.01)
    record("attach/detach controller: reaction to a new pod", f"{milliseconds:.2f} ms", milliseconds <= 10)
    print(f"at rest: {share * 100:.2f} % of a core, {share / 0.01:.2f} of the limit (1 %)")
    print(f"one new pod: {milliseconds:.2f} ms, {milliseconds / 10:.2f} of the limit (10 ms)")
    print(f"growth of the reaction for 10 times the objects: {milliseconds / small[2]:.1f}x")


if __name__ == "__main__":
    asyncio.run(main())
