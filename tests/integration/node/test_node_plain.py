"""Volumes that the agent makes itself: where their files lie, who may read them, what is said of missing ones."""

import base64
import errno
import os
import stat
import threading

import msgspec
import pytest

from moorage.host import hung_paths, mountinfo, mounts
from moorage.host.dir_walk import MountInTheWay
from moorage.host.errors import HostError
from moorage.kube.objects.core import ConfigMap, Secret
from moorage.kube.objects.pods import Pod
from moorage.node.layout import NodeLayout, PodUid, pod_volume_name
from moorage.node.volumes.mounters import builtin
from moorage.node.volumes.mounters.builtin import PlainBody, PlainMounter, plugin_of
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import ActualPod, ActualVolume, MountState, PlainSource, PodRef, StepFailure, VolumeUse
from moorage.testing import until

pytestmark = pytest.mark.root
UID = PodUid("uid-1")
SECRET = {"user": "bob", "password": "x\x00y"}
TOKEN = {"serviceAccountToken": {"path": "token", "audience": "vault", "expirationSeconds": 600}}


def made(kind, document):
    return msgspec.convert(document, kind)


class Api:
    """A secret `s`, a configMap `c`, and tokens that are numbered."""

    def __init__(self):
        data = {key: base64.b64encode(value.encode()).decode() for key, value in SECRET.items()}
        meta = {"namespace": "ns"}
        self.objects = {
            (Secret, "s"): made(Secret, {"metadata": {"name": "s", **meta}, "data": data}),
            (ConfigMap, "c"): made(ConfigMap, {"metadata": {"name": "c", **meta}, "data": {"a": "1"}}),
        }
        self.tokens, self.forgotten = [], []

    async def shared(self, kind, name, pod):
        return self.objects.get((kind, name))

    async def token(self, pod, audience, expiration_s):
        self.tokens.append((pod.uid, audience, expiration_s))
        return f"token-{len(self.tokens)}", ""

    def forget_pod(self, uid):
        self.forgotten.append(uid)


class Bench:
    def __init__(self, root):
        self.layout, self.api = NodeLayout(root), Api()
        self.mounter = PlainMounter(self.layout, self.api)

    def use(self, body, fs_group=None, spec=None):
        document = {
            "metadata": {"name": "p", "namespace": "ns", "uid": UID, "labels": {"app": "x"}},
            "spec": {"volumes": [{"name": "v", **body}], **(spec or {})},
        }
        pod = made(Pod, document)
        volume = pod.spec.volumes[0]
        plugin = plugin_of(volume)
        source = PlainSource(plugin, "v", PlainBody(volume, pod))
        return VolumeUse(pod_volume_name(plugin, UID, "v"), PodRef(UID, "ns", "p"), source, ("v",), fs_group=fs_group)

    async def make(self, body, fs_group=None, spec=None):
        use = self.use(body, fs_group, spec)
        await self.mounter.publish(use, MountState.ABSENT, False)
        return self.layout.plain_volume(UID, use.source.plugin, "v")

    async def remove(self, body):
        use = self.use(body)
        volume = ActualVolume(use.volume, PlainSource(use.source.plugin, "v", None))  # as found after a restart
        volume.pods[UID] = ActualPod(MountState.UNCERTAIN, source=volume.source)
        await self.mounter.unpublish(volume, UID)


@pytest.fixture
def bench(tmp_path):
    yield Bench(tmp_path)
    left = [one.target for one in mountinfo.mounts_below(tmp_path)]
    for target in reversed(left):
        mounts.unmount(target, lazy=True)
    assert left == []


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


PROJECTED = {"projected": {"sources": [TOKEN, {"secret": {"name": "s"}}, {"configMap": {"name": "c"}}]}}


@pytest.mark.parametrize(
    ("body", "in_memory"),
    [
        ({"secret": {"secretName": "s"}}, True),
        (PROJECTED, True),
        ({"configMap": {"name": "c"}}, False),
        ({"emptyDir": {}}, False),
        ({"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}, True),
        ({"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}}, False),
    ],
    ids=["secret", "projected", "configMap", "emptyDir", "emptyDir in memory", "downwardAPI"],
)
async def test_what_is_secret_never_reaches_a_disk_and_all_of_it_goes_again(bench, body, in_memory):
    place = await bench.make(body)
    found = mountinfo.mount_at(place)
    assert (found is not None and found.fstype == "tmpfs") is in_memory
    await bench.make(body)  # once more is once
    assert len(mountinfo.mounts_below(place)) == in_memory
    await bench.remove(body)
    assert mountinfo.mounts_below(bench.layout.root) == []
    assert not bench.layout.volumes_of(UID).exists()
    assert bench.api.forgotten == [UID]


async def test_an_empty_dir_in_memory_is_no_larger_than_it_may_be(bench):
    place = await bench.make({"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
    assert os.statvfs(place).f_blocks * os.statvfs(place).f_frsize == 1 << 20
    with pytest.raises(OSError, match="No space left"):
        (place / "large").write_bytes(b"x" * (2 << 20))
    await bench.remove({"emptyDir": {}})


MEMORY = {"emptyDir": {"medium": "Memory"}}


def knows_no_swap(path):
    """Whether the kernel can keep a tmpfs from being swapped out."""
    try:
        mounts.mount("none", path, "tmpfs", ["noswap"])
    except HostError:
        return False
    mounts.unmount(path)
    return True


@pytest.mark.parametrize(
    "body", [{"secret": {"secretName": "s"}}, PROJECTED, MEMORY], ids=["secret", "projected", "memory"]
)
async def test_what_is_in_memory_is_not_swapped_out(bench, tmp_path, cannot_run, body):
    if not knows_no_swap(tmp_path):
        cannot_run("this kernel has no tmpfs without swap")
    place = await bench.make(body)
    assert "noswap" in mountinfo.mount_at(place).super_options
    await bench.remove(body)


async def test_a_kernel_that_does_not_know_how_to_keep_a_tmpfs_from_swap_is_asked_once(bench, monkeypatch):
    asked, mount = [], mounts.mount

    def old(source, target, fstype, options):
        asked.append("noswap" in options)
        if "noswap" in options:
            raise HostError("mount tmpfs: Invalid argument (EINVAL)", errno.EINVAL)
        mount(source, target, fstype, options)

    monkeypatch.setattr(mounts, "mount", old)
    for _ in range(2):
        place = await bench.make(MEMORY, fs_group=4321)
        assert (mode_of(place), place.stat().st_gid) == (0o2777, 4321)
        await bench.remove(MEMORY)
    assert asked == [True, False, False]


async def test_another_option_that_is_wrong_is_not_held_against_the_kernel(bench, monkeypatch):
    mount = mounts.mount

    def wrong(*_):
        raise HostError("mount tmpfs: Invalid argument (EINVAL)", errno.EINVAL)

    monkeypatch.setattr(mounts, "mount", wrong)
    with pytest.raises(StepFailed, match="Invalid argument"):
        await bench.make(MEMORY)
    seen = []
    monkeypatch.setattr(mounts, "mount", lambda *all_of: seen.append(all_of[3]) or mount(*all_of))
    await bench.make(MEMORY)
    assert "noswap" in seen[0]
    await bench.remove(MEMORY)


async def test_keys_paths_and_modes_are_those_of_the_pod(bench):
    items = [{"key": "user", "path": "deep/name", "mode": 0o400}, {"key": "password", "path": "p"}]
    place = await bench.make({"secret": {"secretName": "s", "items": items, "defaultMode": 0o440}})
    assert (place / "deep" / "name").read_text() == "bob"
    assert (place / "p").read_text() == SECRET["password"]
    assert (mode_of(place / "deep" / "name"), mode_of(place / "p")) == (0o400, 0o440)
    assert sorted(one.name for one in place.iterdir() if not one.name.startswith("..")) == ["deep", "p"]
    await bench.remove({"secret": {}})


def users(*containers, pod=None, init=()):
    """A pod whose containers run as these users; None leaves it to the pod, or to the image."""

    def named(prefix, found):
        for number, uid in enumerate(found):
            yield {"name": f"{prefix}{number}", "securityContext": {} if uid is None else {"runAsUser": uid}}

    return {
        "securityContext": {} if pod is None else {"runAsUser": pod},
        "initContainers": list(named("i", init)),
        "containers": list(named("c", containers)),
    }


@pytest.mark.parametrize(
    ("spec", "fs_group", "token"),
    [
        (users(None), None, (0o644, 0, 0)),  # whoever the image says
        (users(None), 4321, (0o640, 0, 4321)),
        (users(None, None, pod=1000), None, (0o600, 1000, 0)),
        (users(1000, None, pod=1000, init=[1000]), None, (0o600, 1000, 0)),
        (users(1000, 1000), None, (0o600, 1000, 0)),
        (users(0), None, (0o600, 0, 0)),
        (users(1000, 1001), None, (0o644, 0, 0)),
        (users(1000, None), None, (0o644, 0, 0)),
        (users(1000, init=[0]), None, (0o644, 0, 0)),
        (users(1000, 1001), 4321, (0o640, 0, 4321)),
        (users(1000), 4321, (0o640, 1000, 4321)),
    ],
)
async def test_a_token_is_for_its_pod_and_can_be_read_there(bench, spec, fs_group, token):
    place = await bench.make(PROJECTED, fs_group, spec)
    assert (place / "token").read_text() == "token-1"
    assert bench.api.tokens == [(UID, "vault", 600)]
    status = (place / "token").stat()
    assert (mode_of(place / "token"), status.st_uid, status.st_gid) == token
    assert (place / "user").read_text() == "bob"
    assert (place / "a").read_text() == "1"
    await bench.make(PROJECTED, fs_group, spec)  # the token has become another one
    assert (place / "token").read_text() == "token-2"
    await bench.remove(PROJECTED)


async def test_a_token_that_is_nobodys_own_has_the_mode_of_the_volume(bench):
    body = {"projected": {"defaultMode": 0o440, "sources": [TOKEN]}}
    place = await bench.make(body)
    assert mode_of(place / "token") == 0o440
    await bench.remove(body)


NAME = {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}


@pytest.mark.parametrize(
    "body",
    [
        {"downwardAPI": {"defaultMode": 0, "items": [NAME]}},
        {"downwardAPI": {"defaultMode": 0o400, "items": [{**NAME, "mode": 0}]}},
        {"projected": {"defaultMode": 0, "sources": [{"downwardAPI": {"items": [NAME]}}]}},
        {"projected": {"sources": [{"downwardAPI": {"items": [{**NAME, "mode": 0}]}}]}},
        {"projected": {"sources": [{"secret": {"name": "s", "items": [{"key": "user", "path": "name", "mode": 0}]}}]}},
        {"secret": {"secretName": "s", "defaultMode": 0, "items": [{"key": "user", "path": "name"}]}},
    ],
)
async def test_nothing_at_all_is_a_mode_as_well(bench, body):
    place = await bench.make(body)
    assert mode_of(place / "name") == 0
    await bench.remove(body)


@pytest.mark.parametrize(
    "sources",
    [[], [{}], [{"downwardAPI": {}}], [{"downwardAPI": {"items": []}}, {"secret": None}]],
    ids=["no source", "nothing", "no items", "several"],
)
async def test_a_projected_volume_of_nothing_is_an_empty_directory(bench, sources):
    body = {"projected": {"sources": sources}}
    place = await bench.make(body)
    assert [one.name for one in place.iterdir() if not one.name.startswith("..")] == []
    await bench.remove(body)


async def test_a_source_that_nobody_makes_is_named(bench):
    body = {"projected": {"sources": [{"secret": {"name": "s"}}, {"clusterTrustBundle": {}, "secret": None}]}}
    with pytest.raises(StepFailed, match="projected source clusterTrustBundle is not made"):
        await bench.make(body)


async def test_a_volume_that_could_be_made_in_part_only_goes_with_its_pod(bench):
    items = [{"key": "user", "path": "x"}, {"key": "password", "path": "x/y"}]
    body = {"secret": {"secretName": "s", "items": items}}
    with pytest.raises(StepFailed, match="lies below") as caught:
        await bench.make(body)
    assert (caught.value.failure, caught.value.step) == (StepFailure.UNCERTAIN, "pod")  # so it will be unpublished
    await bench.remove(body)
    assert not bench.layout.volumes_of(UID).exists()


async def test_a_path_of_the_host_that_hangs_holds_up_nobody_else_and_no_more_than_one_thread(bench, monkeypatch):
    seen, answers = [], threading.Event()

    def hangs(*_what):
        seen.append(threading.current_thread())
        assert answers.wait(20)

    monkeypatch.setattr(builtin, "_check_host_path", hangs)
    monkeypatch.setattr(hung_paths, "_ANSWER_S", 0.05)
    body = {"hostPath": {"path": "/mnt/dead", "type": "Directory"}}
    for _ in range(3):
        with pytest.raises(StepFailed, match="hostPath /mnt/dead does not answer") as caught:
            await bench.make(body)
        assert (caught.value.failure, caught.value.step) == (StepFailure.TRANSIENT, "pod")
    assert len(seen) == 1
    assert seen[0] is not threading.main_thread()
    answers.set()
    await until(lambda: not hung_paths._open)
    monkeypatch.setattr(hung_paths, "_ANSWER_S", 20.0)
    await bench.make(body)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"secret": {"secretName": "none"}}, "secret ns/none not found"),
        ({"configMap": {"name": "none"}}, "configmap ns/none not found"),
        ({"secret": {"secretName": "s", "items": [{"key": "no", "path": "x"}]}}, "has no key 'no'"),
        ({"projected": {"sources": [{"clusterTrustBundle": {}}]}}, "projected source clusterTrustBundle"),
        ({"hostPath": {"path": "/nowhere/at/all", "type": "Directory"}}, "is not a Directory"),
        ({"hostPath": {"path": "/etc", "type": "File"}}, "is not a File"),
    ],
)
async def test_what_is_missing_is_named_and_nothing_is_made(bench, body, words):
    with pytest.raises(StepFailed, match=words) as caught:
        await bench.make(body)
    assert (caught.value.failure, caught.value.step) == (StepFailure.TRANSIENT, "pod")
    assert not bench.layout.volumes_of(UID).exists()


@pytest.mark.parametrize(
    "body",
    [
        {"secret": {"secretName": "none", "optional": True}},
        {"secret": {"secretName": "s", "optional": True, "items": [{"key": "no", "path": "x"}]}},
        {"projected": {"sources": [{"configMap": {"name": "none", "optional": True}}]}},
    ],
)
async def test_what_is_optional_may_be_missing(bench, body):
    place = await bench.make(body)
    assert [one.name for one in place.iterdir() if not one.name.startswith("..")] == []
    await bench.remove(body)


async def test_a_path_of_the_host_is_never_touched_but_made_if_that_is_asked(bench, tmp_path):
    wanted = tmp_path / "made" / "here"
    body = {"hostPath": {"path": str(wanted), "type": "DirectoryOrCreate"}}
    await bench.make(body)
    (wanted / "file").write_text("kept")
    await bench.remove(body)
    assert (wanted / "file").read_text() == "kept"
    await bench.make({"hostPath": {"path": str(wanted / "new"), "type": "FileOrCreate"}})
    assert (wanted / "new").is_file()


@pytest.mark.parametrize("body", [{"emptyDir": {}}, {"configMap": {"name": "c"}}, {"secret": {"secretName": "s"}}])
async def test_a_mount_that_somebody_made_over_it_is_not_taken_for_ours(bench, tmp_path, body):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("irreplaceable")
    place = await bench.make(body)
    mounts.bind(precious, place)
    with pytest.raises(MountInTheWay):
        await bench.remove(body)
    assert (precious / "data").read_text() == "irreplaceable"
    mounts.unmount(place)
    await bench.remove(body)
    assert not place.exists()
