"""An account gets objects past the API server that it should have refused: the node agent, as root, does not obey."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from tests.support.node_lab import node_lab

from moorage.errors import InvalidRequest
from moorage.kube.objects.core import Event
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.node.layout import NodeLayout
from moorage.node.plugins.manager import PluginManager, Refused
from moorage.node.safe_names import UnsafeName, bad_names, component
from moorage.node.volumes.mounters.payload import File, write_payload

pytestmark = pytest.mark.root
OUT = ("../../../evil", "..", ".", "", "a/b", "/etc/evil", "a\0b", "x" * 300, "Upper", "-a", "a\n")


@pytest.fixture
async def lab(tmp_path):
    async with node_lab(tmp_path) as made:
        yield made


def pod_from(document, **metadata):
    meta = {"namespace": "default", "name": "evil", "uid": "0f1e2d3c-0000-4000-8000-00000000evil", **metadata}
    return msgspec.convert({"metadata": meta, "spec": {"nodeName": "n1", **document}}, Pod)


def container(name, **more):
    return {"name": name, "image": "host", "command": ["true"], **more}


async def seen_by_agent(lab, pod):
    """The pod reaches the agent as if its API server had stored it."""
    before = everything(lab)
    lab.agent.pods.pod_changed(None, pod)
    await asyncio.sleep(1.0)
    return before


def everything(lab):
    """Every path in the directories that could be reached, without the agent's own changing files."""
    return {str(path) for path in lab.base.rglob("*") if "/pods/" not in str(path) and "/agent/" not in str(path)}


async def events(lab, reason):
    found = await lab.client.list(Event, "default")
    return [one.message for one in found.items if one.reason == reason]


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
async def test_a_container_named_after_a_path_writes_nothing_outside(lab, kind):
    """`pods/resize` once replaced whole containers: one named ../../../evil made the agent write as root."""
    await lab.start_agent()
    spec = {"containers": [container("main")], kind: [container("../../../evil")]}
    before = await seen_by_agent(lab, pod_from(spec))
    assert everything(lab) == before
    assert not (lab.root / "evil").exists()
    assert not (lab.base / "evil").exists()
    assert not list(lab.root.glob("pods/*/containers"))

    async def said():
        return [one for one in await events(lab, "InvalidName") if "../../../evil" in one]

    await lab.until(said, what="event")
    await lab.stop_agent()


async def test_a_running_pod_gets_no_such_container_later(lab):
    await lab.start_agent()
    pod = await lab.pod(claim="")
    running = await lab.phase("p1", "Running")
    changed = msgspec.structs.replace(
        running,
        spec=msgspec.structs.replace(
            running.spec, containers=[msgspec.structs.replace(running.spec.containers[0], name="../../../../evil")]
        ),
    )
    before = everything(lab)
    lab.agent.pods.pod_changed(running, changed)
    await asyncio.sleep(1.0)
    assert everything(lab) == before
    assert [path.name for path in (lab.root / "pods" / pod.uid / "containers").iterdir()] == ["main"]
    lab.agent.pods.pod_changed(changed, running)
    await lab.end("p1")


async def test_a_volume_named_after_a_path_is_made_nowhere(lab):
    await lab.start_agent()
    mount = {"name": "../../../../evil", "mountPath": "/v"}
    spec = {"containers": [container("main", volumeMounts=[mount])]}
    before = await seen_by_agent(lab, pod_from({**spec, "volumes": [{"name": "../../../../evil", "emptyDir": {}}]}))
    assert everything(lab) == before
    assert not (lab.root / "evil").exists()
    await lab.stop_agent()


@pytest.mark.parametrize("uid", ["../../evil", "..", "/tmp/evil", "a/b", ""])
async def test_a_uid_that_is_a_path_is_ignored(lab, uid):
    await lab.start_agent()
    before = await seen_by_agent(lab, pod_from({"containers": [container("main")]}, uid=uid))
    assert everything(lab) == before
    assert uid not in lab.agent.pods.workers
    await lab.stop_agent()


async def test_a_persistent_volume_or_driver_named_after_a_path_is_not_mounted(lab):
    """The binder's work is done by the attacker: a claim that is bound to a volume with such a name."""
    await lab.driver_object()
    await lab.volume()
    async with lab.driver() as driver:
        agent = await lab.start_agent()
        claim = await lab.client.get(PersistentVolumeClaim, "c1", "default")
        good = await lab.client.get(PersistentVolume, "pv-c1")
        for name, driver_name in (("../../../../../evil", "scripted.dev"), ("pv-c1", "../../../evil")):
            csi = msgspec.structs.replace(good.spec.csi, driver=driver_name)
            bad = msgspec.structs.replace(
                good,
                metadata=msgspec.structs.replace(good.metadata, name=name),
                spec=msgspec.structs.replace(good.spec, csi=csi),
            )
            agent.volumes._sources.volume = lambda _name, bad=bad: bad
            spec = {
                "containers": [container("main", volumeMounts=[{"name": "data", "mountPath": "/d"}])],
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim.name}}],
            }
            uid = f"0f1e2d3c-0000-4000-8000-{len(driver_name):012}"
            before = await seen_by_agent(lab, pod_from(spec, uid=uid, name=f"evil-{len(driver_name)}"))
            assert everything(lab) == before
            assert not [name for name, _ in driver.calls if name == "NodeStageVolume"]
            assert not agent.volumes.world.actual
        await lab.stop_agent()


def test_keys_of_objects_stay_in_their_volume(tmp_path):
    directory = tmp_path / "payload"
    directory.mkdir()
    for key in ("../evil", "../../evil", "..", "/evil", "a/../../evil", "a\0b", "..data"):
        with pytest.raises(InvalidRequest):
            write_payload(directory, {key: File(b"x", 0o644)})
    assert os.listdir(directory) == []


@pytest.mark.parametrize("name", OUT)
def test_no_such_name_is_accepted_in_a_pod(name):
    assert bad_names(pod_from({"containers": [container(name)]}))
    assert bad_names(pod_from({"containers": [container("a")], "volumes": [{"name": name}]}))
    assert bad_names(pod_from({"containers": [container("a")]}, namespace=name))


def test_two_containers_do_not_share_a_directory():
    assert bad_names(pod_from({"containers": [container("a"), container("a")]}))


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "a/b", "a\0b", "x" * 256])
def test_no_path_of_the_agent_leads_out_of_its_directory(name):
    layout = NodeLayout(Path("/r"))
    with pytest.raises(UnsafeName):
        component(name)
    for path in (
        lambda: layout.pod(name),
        lambda: layout.attempt("u", name, 0),
        lambda: layout.log_file("n", "p", "u", name, 0),
        lambda: layout.plain_volume("u", "kubernetes.io/empty-dir", name),
        lambda: layout.publish_target("u", name),
        lambda: layout.publish_target(name, "v"),
        lambda: layout.staging(name, "h"),
        lambda: layout.block_data(name),
        lambda: layout.block_map("v", name),
        lambda: layout.block_staging(name),
        lambda: layout.block_publish(name, "u"),
        lambda: layout.block_link("u", name),
    ):
        with pytest.raises(UnsafeName):
            path()


@pytest.mark.parametrize("name", ["../evil", "a/b", "..", "x" * 64, "-a"])
def test_a_driver_named_after_a_path_is_not_registered(name):
    manager = PluginManager.__new__(PluginManager)
    with pytest.raises(Refused, match="valid name"):
        manager._checked("CSIPlugin", name, ["1.0.0"])
