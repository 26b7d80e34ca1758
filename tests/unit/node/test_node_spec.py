"""A container's environment, arguments and identity, from what its pod says."""

import asyncio
import base64
import os
import subprocess
import threading
from dataclasses import replace

import msgspec
import pytest

from moorage.host import hung_paths
from moorage.kube.objects.core import ConfigMap, Secret
from moorage.kube.objects.pods import Pod, PodSecurityContext, PodVolume
from moorage.kube.volumes import VolumeName
from moorage.node.layout import NodeLayout, PodUid
from moorage.node.pods import container_spec
from moorage.node.pods import identity as pod_identity
from moorage.node.pods.container_spec import SpecMaker, api_variables, expand, hostname_of
from moorage.node.pods.errors import BadContainer
from moorage.node.pods.identity import identity
from moorage.node.runtime.sandbox import KEPT_CAPABILITIES
from moorage.node.volumes.mounters.builtin import PlainBody
from moorage.node.volumes.state import CsiSource, PlainSource, PodRef, VolumeUse

MAPS = {"cfg": {"K": "v", "L": "w"}}
SECRETS = {"sec": {"p": "pass", "K": "secret"}}


class Objects:
    """ConfigMaps and secrets of one namespace."""

    async def shared(self, kind, name, _pod):
        if kind is ConfigMap and name in MAPS:
            return ConfigMap(data=MAPS[name])
        if kind is Secret and name in SECRETS:
            return Secret(data={key: base64.b64encode(text.encode()).decode() for key, text in SECRETS[name].items()})
        return None


class Volumes:
    def use_named(self, _uid, _name):
        return object()


class HostPath:
    """One volume of every pod."""

    def __init__(self, path):
        volume = msgspec.convert({"name": "v", "hostPath": {"path": str(path)}}, PodVolume)
        source = PlainSource("kubernetes.io/host-path", "v", PlainBody(volume, Pod()))
        self._use = VolumeUse(VolumeName("v"), PodRef(PodUid("u"), "ns", "p"), source, ("v",))

    def use_named(self, _uid, _name):
        return self._use


def maker(tmp_path):
    return SpecMaker(NodeLayout(tmp_path), Objects(), Volumes(), "10.0.0.7")


def pod(**container):
    document = {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {"app": "x"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "a", "image": "host", "command": ["true"], **container}]},
    }
    return msgspec.convert(document, Pod)


async def made(tmp_path, **container):
    found = pod(**container)
    return await maker(tmp_path).make(found, found.spec.containers[0], [])


def from_(**source):
    return {"name": "X", "valueFrom": source}


@pytest.mark.parametrize(
    ("source", "value"),
    [
        (from_(fieldRef={"fieldPath": "metadata.name"}), "p"),
        (from_(fieldRef={"fieldPath": "metadata.namespace"}), "ns"),
        (from_(fieldRef={"fieldPath": "metadata.uid"}), "u"),
        (from_(fieldRef={"fieldPath": "metadata.labels['app']"}), "x"),
        (from_(fieldRef={"fieldPath": "metadata.annotations['none']"}), ""),
        (from_(fieldRef={"fieldPath": "spec.nodeName"}), "n1"),
        (from_(fieldRef={"fieldPath": "spec.serviceAccountName"}), "default"),
        (from_(fieldRef={"fieldPath": "status.podIP"}), "10.0.0.7"),
        (from_(fieldRef={"fieldPath": "status.hostIPs"}), "10.0.0.7"),
        (from_(resourceFieldRef={"resource": "requests.cpu", "divisor": "1m"}), "250"),
        (from_(resourceFieldRef={"resource": "requests.cpu"}), "1"),
        (from_(resourceFieldRef={"resource": "requests.memory", "divisor": "1Mi"}), "0"),
        (from_(resourceFieldRef={"resource": "limits.memory", "divisor": "1Mi"}), "64"),
        (from_(resourceFieldRef={"resource": "limits.cpu"}), str(os.cpu_count())),  # not set: the whole node
        (from_(configMapKeyRef={"name": "cfg", "key": "K"}), "v"),
        (from_(secretKeyRef={"name": "sec", "key": "p"}), "pass"),
        (from_(configMapKeyRef={"name": "cfg", "key": "none", "optional": True}), None),
        (from_(secretKeyRef={"name": "none", "key": "p", "optional": True}), None),
    ],
)
async def test_a_variable_comes_from_where_it_is_said_to(tmp_path, source, value):
    resources = {"requests": {"cpu": "250m"}, "limits": {"memory": "64Mi"}}
    env = (await made(tmp_path, env=[source], resources=resources))["env"]
    assert env.get("X") == value


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"env": [from_(configMapKeyRef={"name": "none", "key": "K"})]}, 'configmap "none" not found'),
        ({"env": [from_(secretKeyRef={"name": "none", "key": "K"})]}, 'secret "none" not found'),
        ({"env": [from_(configMapKeyRef={"name": "cfg", "key": "n"})]}, "couldn't find key n in ConfigMap ns/cfg"),
        ({"env": [from_(secretKeyRef={"name": "sec", "key": "n"})]}, "couldn't find key n in Secret ns/sec"),
        ({"env": [from_(fieldRef={"fieldPath": "status.phase"})]}, "status.phase"),
        ({"env": [from_(resourceFieldRef={"resource": "nonsense"})]}, "nonsense"),
        ({"envFrom": [{"configMapRef": {"name": "none"}}]}, 'configmap "none" not found'),
        ({"envFrom": [{"secretRef": {"name": "none"}}]}, 'secret "none" not found'),
        ({"securityContext": {"runAsNonRoot": True}}, "runAsNonRoot"),
        ({"volumeMounts": [{"name": "v", "mountPath": "/v", "subPathExpr": "a/$(NONE)"}]}, "missing value for NONE"),
    ],
)
async def test_what_is_missing_is_a_configuration_error_in_words(tmp_path, container, words):
    with pytest.raises(BadContainer) as raised:
        await made(tmp_path, **container)
    assert raised.value.reason == "CreateContainerConfigError"
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (
            {"env": [{"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}}]},
            "fileKeyRef",
        ),
        ({"env": [{"name": "A", "valueFrom": {"newRef": {"optional": True}}}]}, "newRef"),
        ({"envFrom": [{"prefix": "P_", "newRef": {"name": "n"}}]}, "envFrom: newRef"),
    ],
)
async def test_nothing_runs_with_a_part_of_its_configuration(tmp_path, container, words):
    found = pod(**container)
    with pytest.raises(BadContainer, match=f"{words} is not read by this node agent") as raised:
        await maker(tmp_path).make(found, found.spec.containers[0], [])
    assert raised.value.reason == "CreateContainerConfigError"


async def test_a_container_without_a_command_cannot_be_made(tmp_path):
    with pytest.raises(BadContainer) as raised:
        await made(tmp_path, command=[])
    assert raised.value.reason == "CreateContainerError"


async def test_of_a_secret_no_more_is_read_than_the_variable_needs(tmp_path, monkeypatch):
    """It may have a megabyte, and a thousand variables that are of one of its keys each."""
    held = Secret(data={"p": base64.b64encode(b"pass").decode(), "q": "x"})  # which nobody can read

    async def shared(_self, _kind, _name, _pod):
        return held

    monkeypatch.setattr(Objects, "shared", shared)
    found = await made(tmp_path, env=[from_(secretKeyRef={"name": "sec", "key": "p"})])
    assert found["env"]["X"] == "pass"


async def test_later_sources_win_and_single_variables_win_over_whole_maps(tmp_path):
    sources = [
        {"configMapRef": {"name": "cfg"}},
        {"prefix": "S_", "secretRef": {"name": "sec"}},
        {"secretRef": {"name": "sec"}},
        {"configMapRef": {"name": "none", "optional": True}},
    ]
    env = (await made(tmp_path, envFrom=sources, env=[{"name": "L", "value": "own"}]))["env"]
    assert (env["K"], env["L"], env["S_K"], env["S_p"]) == ("secret", "own", "secret", "pass")


async def test_references_reach_what_was_said_before_them(tmp_path):
    env = [
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "1"},
        {"name": "BOTH", "value": "$(LATE)-$(K)-$$(LATE)-$(2X)"},
        {"name": "2X", "value": "2"},
    ]
    found = await made(
        tmp_path, env=env, envFrom=[{"configMapRef": {"name": "cfg"}}], args=["$(BOTH)", "$(2X)", "$(HOSTNAME)", "$x"]
    )
    assert (found["env"]["EARLY"], found["env"]["BOTH"]) == ("$(LATE)", "1-v-$(LATE)-$(2X)")
    # A runtime's own variables are there for the program, not for references to them.
    assert found["argv"] == ["true", "1-v-$(LATE)-$(2X)", "2", "$(HOSTNAME)", "$x"]
    assert found["env"]["HOSTNAME"] == "p"


def test_brackets_that_are_not_closed_are_text():
    assert expand("$(A $(A", {"A": "1"}) == "$(A $(A"
    assert expand("$($(A))", {"A": "1"}) == "$($(A))"


LONGEST = (128 << 10) - 1  # of an argument, or of a variable with its name
TENFOLD = [{"name": "A", "value": "x" * 1000}] + [
    {"name": chr(66 + i), "value": f"$({chr(65 + i)})" * 10} for i in range(5)
]
MANY = [{"name": f"N{i}", "value": "$(A)"} for i in range(60)]


@pytest.mark.parametrize(
    "container",
    [
        {"env": [{"name": "A", "value": "x" * (LONGEST - 2)}], "args": ["$(A)xx"]},
        {"env": [{"name": "E", "value": "ä" * 1000}], "args": ["$(E)" * 65]},
        {"args": ["$(" * 50_000 + "$$" * 10_000]},
    ],
)
async def test_a_text_may_have_what_the_kernel_takes(tmp_path, container):
    found = await made(tmp_path, **container)
    assert len(found["argv"][1].encode()) <= LONGEST
    assert subprocess.run(found["argv"], env=found["env"]).returncode == 0


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"env": TENFOLD}, r"the expansion of '(\$\(C\))+…?' is longer than 128 KiB"),
        ({"env": TENFOLD[:3], "args": ["$(C)$(C)"]}, r"the expansion of '\$\(C\)\$\(C\)' is longer than 128 KiB"),
        ({"env": [{"name": "A", "value": "x" * (LONGEST - 1)}]}, "variable A is longer than 128 KiB"),
        ({"env": [{"name": "A" * LONGEST, "value": "x"}]}, "variable A+… is longer than 128 KiB"),
        ({"args": ["x" * (LONGEST + 1)]}, "argument 1 is longer than 128 KiB"),
        ({"args": ["ä" * (LONGEST // 2 + 1)]}, "argument 1 is longer than 128 KiB"),
        ({"env": [from_(configMapKeyRef={"name": "big", "key": "K"})]}, "variable X is longer than 128 KiB"),
        ({"envFrom": [{"secretRef": {"name": "big"}}]}, "variable K is longer than 128 KiB"),
        ({"env": [{"name": "A", "value": "x" * 120_000}, *MANY]}, "longer than 6 MiB together"),
        ({"env": [{"name": "A", "value": "x" * 120_000}], "args": ["$(A)"] * 60}, "longer than 6 MiB together"),
        ({"args": [""] * 800_000}, "longer than 6 MiB together"),
    ],
)
async def test_what_no_program_could_be_started_with_is_not_even_made(tmp_path, monkeypatch, container, words):
    monkeypatch.setitem(MAPS, "big", {"K": "y" * LONGEST})
    monkeypatch.setitem(SECRETS, "big", {"K": "y" * LONGEST})
    with pytest.raises(BadContainer, match=words) as raised:
        await made(tmp_path, **container)
    assert raised.value.reason == "CreateContainerConfigError"
    assert len(str(raised.value)) < 120
    assert "yy" not in str(raised.value)  # what is in a secret is not told


async def test_home_and_group_are_those_of_the_account(tmp_path, monkeypatch):
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0:root:/root:/bin/sh\nbroken\nweb:x:33:34::/var/www:/bin/false\n")
    monkeypatch.setattr(pod_identity, "_PASSWD", str(passwd))
    assert (await made(tmp_path))["env"]["HOME"] == "/root"
    found = await made(tmp_path, securityContext={"runAsUser": 33})
    assert (found["uid"], found["gid"], found["groups"], found["env"]["HOME"]) == (33, 34, [34], "/var/www")
    found = await made(tmp_path, securityContext={"runAsUser": 4711}, env=[{"name": "HOME", "value": "/mine"}])
    assert (found["uid"], found["gid"], found["env"]["HOME"]) == (4711, 0, "/mine")
    assert identity(None, {"runAsUser": 33, "runAsGroup": 5}, "a")["gid"] == 5
    passwd.unlink()
    assert (await made(tmp_path))["env"]["HOME"] == "/"


@pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 32, (1 << 32) + 1000])
@pytest.mark.parametrize("said", ["runAsUser", "runAsGroup", "supplementalGroups", "fsGroup"])
def test_a_number_that_the_kernel_would_take_for_another_user_or_group_is_refused(said, number):
    context = msgspec.convert({said: [number] if said == "supplementalGroups" else number}, PodSecurityContext)
    with pytest.raises(BadContainer, match=f"{said}: {number} is not from 0 to 2147483647") as raised:
        identity(context, {}, "a")
    assert raised.value.reason == "CreateContainerConfigError"


@pytest.mark.parametrize("number", [-1, 1 << 32, "0", True, 1.5])
def test_a_container_gives_no_other_number_than_its_pod_might(number):
    for said in ("runAsUser", "runAsGroup"):
        with pytest.raises(BadContainer, match=f"{said}: {number!r} is not"):
            identity(None, {said: number}, "a")
    assert identity(None, {"runAsUser": (1 << 31) - 1, "runAsGroup": 0}, "a")["uid"] == (1 << 31) - 1


async def test_rights_are_kept_and_dropped_by_name(tmp_path):
    assert "capabilities" not in await made(tmp_path)

    async def kept(**asked):
        return (await made(tmp_path, securityContext={"capabilities": asked}))["capabilities"]

    assert await kept(drop=["ALL"]) == []
    assert await kept(drop=["ALL"], add=["NET_BIND_SERVICE", "CAP_SYS_ADMIN"]) == [10, 21]
    assert await kept(drop=["mknod"]) == sorted(KEPT_CAPABILITIES - {27})
    assert await kept(add=["ALL"]) == list(range(41))
    assert await kept(add=["ALL"], drop=["SYS_MODULE", "SYS_ADMIN"]) == sorted({*range(41)} - {16, 21})
    assert await kept(add=["ALL", "CHOWN"], drop=["ALL"]) == [0]
    assert await kept(add=["SYS_ADMIN"], drop=["SYS_ADMIN"]) == sorted(KEPT_CAPABILITIES - {21})
    with pytest.raises(BadContainer, match="SYS_NONSENSE") as raised:
        await kept(add=["SYS_NONSENSE"])
    assert raised.value.reason == "CreateContainerError"


@pytest.mark.parametrize(
    ("server", "host", "port"),
    [
        ("https://127.0.0.1:6443", "127.0.0.1", "6443"),
        ("https://api.example", "api.example", "443"),
        ("https://[fd00::1]:8443/", "fd00::1", "8443"),
    ],
)
def test_programs_are_told_where_the_api_server_is(server, host, port):
    assert api_variables(server) == {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": port,
        "KUBERNETES_SERVICE_PORT_HTTPS": port,
    }


@pytest.mark.parametrize("server", ["", "http://localhost", "https://proxy.example/clusters/one"])
def test_they_are_told_of_none_that_a_client_in_a_cluster_could_not_reach(server):
    assert api_variables(server) == {}


async def test_the_pod_has_the_last_word_on_where_the_api_server_is(tmp_path):
    specs = SpecMaker(NodeLayout(tmp_path), Objects(), Volumes(), "10.0.0.7", "https://api.example:1")
    env = [
        {"name": "SEEN", "value": "$(KUBERNETES_SERVICE_HOST):$(KUBERNETES_SERVICE_PORT)"},
        {"name": "KUBERNETES_SERVICE_HOST", "value": "other.example"},
    ]
    found = pod(env=env, args=["$(KUBERNETES_SERVICE_HOST)"])
    document = await specs.make(found, found.spec.containers[0], [])
    assert document["env"]["SEEN"] == "api.example:1"
    assert document["env"]["KUBERNETES_SERVICE_HOST"] == "other.example"
    assert document["argv"][-1] == "other.example"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("p", "p"),
        ("a" * 63, "a" * 63),
        ("a" * 64, "a" * 63),
        ("a" * 62 + "-" + "b" * 20, "a" * 62),
        ("a" * 60 + ".-." + "b", "a" * 60),
    ],
)
async def test_a_host_has_the_name_of_its_pod_as_far_as_a_host_may(tmp_path, name, shown):
    found = msgspec.convert({**msgspec.to_builtins(pod()), "metadata": {"name": name, "uid": "u"}}, Pod)
    document = await maker(tmp_path).make(found, found.spec.containers[0], [])
    assert document["hostname"] == document["env"]["HOSTNAME"] == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"hostname": "h"}, "h"),
        ({"hostnameOverride": "db.example.org"}, "db.example.org"),
        ({"hostname": "h", "hostnameOverride": "a" * 62 + ".b"}, "a" * 62),
    ],
)
def test_a_pod_may_give_its_host_another_name(said, shown):
    assert hostname_of(msgspec.convert({"metadata": {"name": "p"}, "spec": said}, Pod)) == shown


LONG, LONGER = "/a" * 2047, "/a" * 2048  # 4094 bytes, and 4096


def placed(**place):
    return {"volumeMounts": [{"name": "v", "mountPath": "/v", **place}]}


@pytest.mark.parametrize(
    ("container", "what"),
    [
        ({"workingDir": LONGER}, "workingDir"),
        (placed(mountPath=LONGER), "volume v: mountPath"),
        (placed(mountPath="/" + "ä" * 2048), "volume v: mountPath"),
        (placed(subPath=LONGER[1:] + "a"), "volume v: subPath"),
        (placed(subPathExpr="x$(LONG)$(LONG)"), "volume v: subPath"),
        ({"volumeDevices": [{"name": "v", "devicePath": LONGER}]}, "volume v: devicePath"),
    ],
)
async def test_a_path_that_the_kernel_does_not_take_is_named(tmp_path, container, what):
    layout = NodeLayout(tmp_path)
    found = pod(env=[{"name": "LONG", "value": LONG}], **container)
    volumes = Claimed() if "volumeDevices" in container else HostPath(tmp_path)
    with pytest.raises(BadContainer, match=f"^{what} is longer than 4095 bytes$") as raised:
        await SpecMaker(layout, Objects(), volumes, "").make(found, found.spec.containers[0], [])
    assert raised.value.reason == "CreateContainerError"


async def test_a_path_may_be_as_long_as_the_kernel_takes_it(tmp_path):
    found = pod(workingDir=LONG, **placed(mountPath=LONG, subPath=LONG[1:]))
    specs = SpecMaker(NodeLayout(tmp_path), Objects(), HostPath(tmp_path), "")
    document = await specs.make(found, found.spec.containers[0], [])
    (mount,) = document["mounts"]
    assert (document["cwd"], mount["target"], mount["sub_path"]) == (LONG, LONG, LONG[1:])


@pytest.mark.parametrize("mode", [0o777, 0o2775, 0o1777, 0o700])
async def test_a_sub_path_that_is_missing_is_made_as_open_as_its_volume(tmp_path, mode):
    (tmp_path / "v").mkdir()
    (tmp_path / "v").chmod(mode)
    places = [{"name": "v", "mountPath": "/whole"}, {"name": "v", "mountPath": "/part", "subPath": "a/b"}]
    found = pod(volumeMounts=places)
    specs = SpecMaker(NodeLayout(tmp_path), Objects(), HostPath(tmp_path / "v"), "10.0.0.7")
    whole, part = (await specs.make(found, found.spec.containers[0], []))["mounts"]
    assert part["sub_path_mode"] == mode & 0o777
    assert "sub_path_mode" not in whole


@pytest.mark.parametrize("asked", [{"subPath": "a"}, {"mountPropagation": "HostToContainer"}])
async def test_a_volume_that_hangs_holds_up_nobody_and_is_asked_by_one_at_a_time(tmp_path, monkeypatch, asked):
    """`stat` of a filesystem whose server does not answer returns when that does."""
    answers, questions = threading.Event(), []
    (tmp_path / "v").mkdir()
    found = pod(volumeMounts=[{"name": "v", "mountPath": "/v", **asked}])
    specs = SpecMaker(NodeLayout(tmp_path), Objects(), HostPath(tmp_path / "v"), "10.0.0.7")
    monkeypatch.setattr(hung_paths, "_ANSWER_S", 0.05)
    monkeypatch.setattr(container_spec, "_ensure_propagates", lambda path, _wanted: os.stat(path))
    real = os.stat

    def stat(path, **how):
        if str(path) == str(tmp_path / "v"):
            questions.append(threading.current_thread())
            assert threading.current_thread() is not threading.main_thread(), "the whole agent would stop"
            answers.wait(30)
        return real(path, **how)

    monkeypatch.setattr(os, "stat", stat)
    for _ in range(3):
        with pytest.raises(BadContainer, match=f"{tmp_path}/v does not answer") as raised:
            await specs.make(found, found.spec.containers[0], [])
        assert raised.value.reason == "CreateContainerError"
    assert len(questions) == 1
    answers.set()
    async with asyncio.timeout(30):
        while not (made := await _made_or_not(specs, found)):
            await asyncio.sleep(0)
    assert made["mounts"][0]["source"] == str(tmp_path / "v")


async def _made_or_not(specs, found):
    try:
        return await specs.make(found, found.spec.containers[0], [])
    except BadContainer:
        return None


class Claimed:
    """One claim, which every volume of a pod is."""

    def use_named(self, _uid, _name):
        return VolumeUse(VolumeName("v"), PodRef(PodUid("u"), "ns", "p"), CsiSource("d", "h", "pv"), ("a", "b", "c"))


def with_volumes(found, *volumes):
    held = msgspec.structs.replace(found.spec, volumes=msgspec.convert(volumes, list[PodVolume]))
    return msgspec.structs.replace(found, spec=held)


async def test_a_volume_is_read_only_as_the_pod_says_under_each_name(tmp_path):
    found = with_volumes(
        pod(volumeMounts=[{"name": name, "mountPath": f"/{name}"} for name in "abc"]),
        {"name": "a", "persistentVolumeClaim": {"claimName": "c1"}},
        {"name": "b", "persistentVolumeClaim": {"claimName": "c1", "readOnly": True}},
        {"name": "c", "csi": {"driver": "d", "readOnly": True}},
    )
    document = await SpecMaker(NodeLayout(tmp_path), Objects(), Claimed(), "").make(found, found.spec.containers[0], [])
    assert {one["target"]: one["read_only"] for one in document["mounts"]} == {"/a": False, "/b": True, "/c": True}


@pytest.mark.parametrize(
    ("plugin", "is_read_only"),
    [("secret", True), ("configmap", True), ("projected", True), ("downward-api", True), ("empty-dir", False)],
)
async def test_what_the_agent_fills_with_objects_nobody_else_writes_to(tmp_path, plugin, is_read_only):
    volumes = HostPath(tmp_path)
    source = PlainSource(f"kubernetes.io/{plugin}", "v", PlainBody(PodVolume(name="v"), Pod()))
    volumes._use = replace(volumes._use, source=source)
    found = pod(volumeMounts=[{"name": "v", "mountPath": "/v"}])
    document = await SpecMaker(NodeLayout(tmp_path), Objects(), volumes, "").make(found, found.spec.containers[0], [])
    assert document["mounts"][0]["read_only_last"] == is_read_only


async def test_devices_are_of_use_in_directories_of_the_host_and_to_who_may_do_everything(tmp_path):
    found = {}
    for volumes in (HostPath(tmp_path), Claimed()):
        for privileged in (False, True):
            asked = pod(volumeMounts=[{"name": "v", "mountPath": "/v"}], securityContext={"privileged": privileged})
            specs = SpecMaker(NodeLayout(tmp_path), Objects(), volumes, "")
            document = await specs.make(asked, asked.spec.containers[0], [])
            found[type(volumes), privileged] = document["mounts"][0]["has_devices"]
    assert found == {(HostPath, False): True, (HostPath, True): True, (Claimed, False): False, (Claimed, True): True}


async def test_what_is_no_block_device_any_more_is_not_handed_to_a_container(tmp_path):
    layout = NodeLayout(tmp_path)
    path = layout.block_map("pv", PodUid("u"))
    path.parent.mkdir(parents=True)
    path.touch()  # where the device was mounted
    found = with_volumes(
        pod(volumeDevices=[{"name": "a", "devicePath": "/dev/x"}]),
        {"name": "a", "persistentVolumeClaim": {"claimName": "c1"}},
    )
    with pytest.raises(BadContainer, match="no block device"):
        await SpecMaker(layout, Objects(), Claimed(), "").make(found, found.spec.containers[0], [])
