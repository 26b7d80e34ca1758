"""One pod on its way: what it waits for, how long it may, and the order in which its last traces go."""

from dataclasses import replace

import msgspec
import pytest

from moorage.kube.objects.pods import Pod
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.pods import cleanup
from moorage.node.pods.tools import Tools
from moorage.node.pods.worker import PodWorker
from moorage.node.runtime import RunningContainer
from moorage.node.runtime.cgroups import ContainerCgroups


class Volumes:
    """Those of one pod, which come or do not."""

    def __init__(self):
        self.is_there = False

    def want(self, _pod): ...
    def hold(self, _uid): ...
    def leave(self, _uid): ...
    def release(self, _uid): ...

    def is_mounted(self, _pod):
        return self.is_there

    def is_unmounted(self, _uid):
        return True

    def refusals(self, _uid):
        return frozenset()

    def unmounted(self, _pod):
        return ["data"]

    async def publish_again(self, _uid, _is_lost): ...


class Runtime:
    """Containers that heed no signal."""

    def __init__(self):
        self.sent = []

    def stop(self, container):
        self.sent.append(("stop", container.name))

    def kill(self, container):
        self.sent.append(("kill", container.name))


class Statuses:
    def __init__(self):
        self.told = None

    def put(self, _pod, status):
        self.told = status

    def last(self, _uid):
        return self.told

    def forget(self, _uid): ...


class Recorder:
    def normal(self, *_): ...
    def warning(self, *_): ...


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def tools(tmp_path):
    groups = ContainerCgroups("n1", [(1, tmp_path / "cgroup")])
    return Tools(
        NodeLayout(tmp_path / "root"),
        None,
        Volumes(),
        Runtime(),
        None,
        groups,
        Statuses(),
        Recorder(),
        "10.0.0.7",
        Clock(),
    )


def pod(metadata=None, image="host", init=(), **spec):
    return msgspec.convert(
        {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", **(metadata or {})},
            "spec": {"containers": [{"name": "a", "image": image}], "initContainers": list(init), **spec},
        },
        Pod,
    )


def worker_of(tools, found):
    worker = PodWorker(tools, PodUid("u"))
    worker.pod = found
    return worker


@pytest.mark.parametrize("image", ["host", "nginx"], ids=["for its volumes", "in vain"])
async def test_a_pod_that_waits_is_over_when_its_time_is(tools, image):
    worker = worker_of(tools, pod(image=image, activeDeadlineSeconds=3))
    assert await worker.sync() <= 3.0
    assert tools.statuses.told["phase"] == "Pending"
    tools.clock.now += 3.0
    await worker.sync()
    assert (tools.statuses.told["phase"], tools.statuses.told["reason"]) == ("Failed", "DeadlineExceeded")


async def test_a_pod_without_a_deadline_waits_for_as_long_as_it_takes(tools):
    worker = worker_of(tools, pod(image="nginx"))
    assert await worker.sync() is None


def running(tmp_path, name="a"):
    found = RunningContainer("u", name, 0, tmp_path / name, tmp_path / "log", {"started": 1.0})
    found.pidfd = 999
    return found


@pytest.mark.parametrize(
    ("deleted", "spec", "killed_after_s"),
    [
        pytest.param({"deletionGracePeriodSeconds": 30}, {}, 30.0, id="what was asked for"),
        pytest.param({"deletionGracePeriodSeconds": 1}, {}, 2.0, id="no less than two seconds"),
        pytest.param({"deletionGracePeriodSeconds": 0}, {}, 0.0, id="by force, kept by a finalizer"),
        pytest.param(None, {"terminationGracePeriodSeconds": 1}, 2.0, id="by the pod's own word"),
    ],
)
async def test_a_container_has_a_moment_between_being_asked_and_being_killed(
    tools, tmp_path, deleted, spec, killed_after_s
):
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z", **deleted} if deleted else None
    worker = worker_of(tools, pod(metadata, **spec))
    worker.is_draining = deleted is None
    worker.containers = {"a": [running(tmp_path)]}
    waits = []
    while ("kill", "a") not in tools.runtime.sent:
        again_s = await worker.sync()
        waits.append(0.0 if ("kill", "a") in tools.runtime.sent else again_s)
        tools.clock.now += waits[-1]
    assert (sum(waits), tools.runtime.sent) == (killed_after_s, [("stop", "a"), ("kill", "a")])


async def test_kubectl_debug_is_told_why_it_waits(tools):
    asked = pod(ephemeralContainers=[{"name": "debug", "image": "host"}])
    await worker_of(tools, asked).sync()
    (told,) = tools.statuses.last("u")["ephemeralContainerStatuses"]
    assert told["name"] == "debug"
    assert "kubectl exec" in told["state"]["waiting"]["message"]


class Killed(BaseException):
    """The agent ends here."""


@pytest.mark.parametrize("step", ["remove_logs", "remove", "remove_pod_directory"])
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_nothing_of_a_pod_that_is_gone_outlives_an_agent_killed_while_removing_it(
    tools, tmp_path, monkeypatch, step, is_done
):
    layout = tools.layout
    traces = [layout.logs / "ns_p_u" / "a", tmp_path / "cgroup/kubepods/n1/podu", layout.containers_of("u") / "a"]
    for trace in traces:
        trace.mkdir(parents=True)

    with monkeypatch.context() as dying:
        owner = tools.cgroups if step == "remove" else cleanup
        work = getattr(owner, step)

        def die(*args):
            if is_done:
                work(*args)
            raise Killed

        dying.setattr(owner, step, die)
        with pytest.raises(Killed):
            await gone(tools, "u").sync()

    again = replace(tools, cgroups=ContainerCgroups("n1", [(1, tmp_path / "cgroup")]))
    for uid in cleanup.pod_directories(layout):  # this is how the next agent learns of it
        await gone(again, uid).sync()
    assert [trace for trace in (*traces, layout.pod("u"), traces[0].parent) if trace.exists()] == []


def gone(tools, uid):
    worker = PodWorker(tools, uid)
    worker.mark_deleted()
    return worker
