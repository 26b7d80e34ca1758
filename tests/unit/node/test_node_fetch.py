"""What is asked of the API server before a driver is called, and which answers keep the driver from being called."""

import asyncio
import json
import math
import time

import pytest
from msgspec import convert

from moorage.kube.errors import ApiError
from moorage.kube.objects.core import Node, Secret
from moorage.kube.objects.pods import Pod
from moorage.kube.objects.storage import CSIDriver, VolumeAttachment
from moorage.kube.objects.volumes import PersistentVolumeClaim
from moorage.kube.volumes import attachment_name, csi_volume_name
from moorage.node.layout import PodUid
from moorage.node.volumes import live_reads as module
from moorage.node.volumes.claims import LiveClaims
from moorage.node.volumes.live_reads import Fetch
from moorage.node.volumes.rules import StepFailed
from moorage.node.volumes.state import CsiSource, PodRef, StepFailure, VolumeUse
from moorage.node.volumes.wire import TOKENS_KEY

NAME = csi_volume_name("d", "h")
POD = PodRef(PodUid("uid-p"), "ns", "p", "worker")
SOURCE = CsiSource("d", "h", "pv", claim="ns/c", claim_uid="uid-c")


def use(source=SOURCE, **fields):
    return VolumeUse(NAME, POD, source, ("data",), **{"is_attachable": True, **fields})


class Api:
    """Holds objects by kind and name; asked for tokens, gives numbered ones."""

    def __init__(self):
        self.objects, self.asked, self.fails = {}, [], False
        self.finds, self.may_answer = 0, asyncio.Event()
        self.may_answer.set()
        self.ends, self.token = "2026-01-01T01:00:00Z", "token-{}"

    def put(self, kind, name, document):
        self.objects[kind, name] = convert({"metadata": {"name": name}, **document}, kind)

    async def find(self, kind, name, namespace=""):
        if self.fails:
            raise ApiError(500, "InternalError", "no answer")
        self.finds += 1
        found = self.objects.get((kind, name))
        await self.may_answer.wait()
        return found

    async def get(self, kind, name, namespace=""):
        found = await self.find(kind, name, namespace)
        if found is None:
            raise ApiError(404, "NotFound", name)
        return found

    async def request(self, verb, path, body):
        if self.fails:
            raise ApiError(500, "InternalError", "no answer")
        self.asked.append((path, body))
        status = {"token": self.token.format(len(self.asked)), "expirationTimestamp": self.ends}
        return json.dumps({"status": status}).encode()


class Drivers(dict):
    def set(self, **spec):
        self["d"] = convert({"metadata": {"name": "d"}, "spec": spec}, CSIDriver)


@pytest.fixture
def api():
    return Api()


@pytest.fixture
def drivers():
    return Drivers()


@pytest.fixture
def fetch(api, drivers):
    return Fetch(api, "n", drivers, LiveClaims(api))


async def refused(call, words):
    with pytest.raises(StepFailed, match=words) as caught:
        await call
    assert caught.value.failure is StepFailure.TRANSIENT  # the driver was not asked
    return True


def node(api, attached=(), in_use=()):
    status = {"volumesAttached": [{"name": one, "devicePath": ""} for one in attached], "volumesInUse": list(in_use)}
    api.put(Node, "n", {"status": status})


async def test_the_node_itself_must_list_the_volume_as_attached_and_as_in_use(api, fetch):
    assert await refused(fetch.confirm_attached(use()), "cannot be read")
    node(api, in_use=[NAME])
    assert await refused(fetch.confirm_attached(use()), "as attached")
    node(api, attached=[NAME])  # it was cleared a moment ago: the controller may be about to detach
    assert await refused(fetch.confirm_attached(use()), "as in use")
    node(api, attached=[NAME], in_use=[NAME])
    await fetch.confirm_attached(use())
    api.fails = True
    await fetch.confirm_attached(use(is_attachable=False))  # then nobody is asked


@pytest.mark.parametrize(
    ("status", "meta", "words"),
    [
        ({}, {}, "the attacher is not done"),
        ({"attached": False, "attachError": {"message": "no room"}}, {}, "no room"),
        ({"attached": True}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "being deleted"),
    ],
)
async def test_an_attachment_that_is_not_there_holds_the_call_back(api, fetch, status, meta, words):
    name = attachment_name("d", "h", "n")
    assert await refused(fetch.publish_context(use(), SOURCE), "does not exist")
    api.put(VolumeAttachment, name, {"metadata": {"name": name, **meta}, "status": status})
    assert await refused(fetch.publish_context(use(), SOURCE), words)


async def test_the_attachments_metadata_is_the_publish_context_and_nothing_without_attachment(api, fetch):
    status = {"attached": True, "attachmentMetadata": {"device": "sdx"}, "attachError": {"message": "old"}}
    api.put(VolumeAttachment, attachment_name("d", "h", "n"), {"status": status})
    assert (await fetch.for_stage(use(), SOURCE)).publish_context == {
        "device": "sdx"
    }  # attached wins over an old error
    assert (await fetch.for_publish(use(is_attachable=False), SOURCE)).publish_context == {}


def claim(api, uid="uid-c", volume="pv"):
    api.put(PersistentVolumeClaim, "c", {"metadata": {"name": "c", "uid": uid}, "spec": {"volumeName": volume}})


async def test_a_claim_made_anew_under_its_name_is_not_taken_for_the_old_one(api, drivers):
    heard = []

    class Claims(LiveClaims):
        def remember(self, claim):
            heard.append(claim)

    fetch = Fetch(api, "n", drivers, Claims(api))
    claim(api)
    await fetch.confirm_claim(POD, SOURCE)
    assert heard == []
    claim(api, uid="uid-new", volume="pv-of-another")
    assert await refused(fetch.confirm_claim(POD, SOURCE), "no longer, bound")
    assert [one.uid for one in heard] == ["uid-new"]  # so that the pod gets the right volume at once
    api.objects.clear()
    assert await refused(fetch.confirm_claim(POD, SOURCE), "no longer, bound")
    api.fails = True
    assert await refused(fetch.confirm_claim(POD, SOURCE), "cannot be read")
    await fetch.confirm_claim(POD, CsiSource("d", "h", "v", is_ephemeral=True))  # has no claim


@pytest.mark.parametrize("wanted", [True, False])
async def test_pod_info_is_given_only_to_drivers_that_ask_for_it(drivers, fetch, wanted):
    drivers.set(podInfoOnMount=wanted)
    for is_block in (False, True):
        extras = await fetch.for_publish(use(is_attachable=False), CsiSource("d", "h", "pv", is_block=is_block))
        assert ("csi.storage.k8s.io/pod.uid" in extras.context) is wanted
    assert (await fetch.for_stage(use(is_attachable=False), SOURCE)).context == {}


async def test_secrets_are_those_of_the_step_and_a_missing_one_holds_the_call_back(api, fetch):
    named = {"stage_secret": _secret("s1"), "publish_secret": _secret("s2")}
    source = CsiSource("d", "h", "pv", **named)
    assert await refused(fetch.for_stage(use(is_attachable=False), source), "ns/s1")
    for name in ("s1", "s2"):
        api.put(Secret, name, {"data": {"key": "dmFsdWU="}})
    api.put(Secret, "s2", {"data": {"other": "dmFsdWU="}})
    assert (await fetch.for_stage(use(is_attachable=False), source)).secrets == {"key": "value"}
    assert (await fetch.for_publish(use(is_attachable=False), source)).secrets == {"other": "value"}


def _secret(name):
    from moorage.kube.objects.meta import SecretReference

    return SecretReference(name=name, namespace="ns")


class Seen:
    """Pods that come one after the other, and what they find in the secret `s`."""

    def __init__(self, api, drivers):
        self.api, self.at = api, {}
        self.fetch = Fetch(api, "n", drivers, LiveClaims(api), self.at.__getitem__)

    def change(self, text):
        self.api.put(Secret, "s", {"data": {"key": text}})

    def pod(self):
        uid = f"uid-{len(self.at)}"
        self.at[uid] = time.monotonic()
        return convert({"metadata": {"name": uid, "namespace": "ns", "uid": uid}}, Pod)

    async def found(self, pod):
        secret = await self.fetch.shared(Secret, "s", pod)
        return secret.data["key"] if secret is not None else None


@pytest.fixture
def seen(api, drivers):
    return Seen(api, drivers)


async def test_a_pod_made_after_a_secret_was_changed_gets_the_new_one(seen):
    one = seen.pod()
    assert await seen.found(one) is None
    seen.change("first")
    assert await seen.found(seen.pod()) == "first"
    seen.change("second")
    assert await seen.found(seen.pod()) == "second"


async def test_pods_that_come_together_share_a_read_and_the_next_ones_the_next(seen):
    seen.change("first")
    seen.api.may_answer.clear()
    waiting = [asyncio.create_task(seen.found(pod)) for pod in [seen.pod() for _ in range(200)]]
    while not seen.api.finds:
        await asyncio.sleep(0)
    seen.change("second")  # the answer to the first read is on its way
    later = [asyncio.create_task(seen.found(pod)) for pod in [seen.pod() for _ in range(200)]]
    await asyncio.sleep(0)
    seen.api.may_answer.set()
    assert set(await asyncio.gather(*waiting)) == {"first"}
    assert set(await asyncio.gather(*later)) == {"second"}
    assert seen.api.finds == 2


async def test_a_secret_is_read_again_for_a_pod_that_has_long_been_there(seen, monkeypatch):
    pod = seen.pod()
    seen.change("first")
    assert await seen.found(pod) == "first"
    seen.change("second")
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3)
    assert await seen.found(pod) == "second"


async def test_a_secret_that_cannot_be_read_now_is_read_the_next_time(seen):
    seen.change("first")
    seen.api.fails = True
    with pytest.raises(ApiError):
        await seen.found(seen.pod())
    seen.api.fails = False
    assert await seen.found(seen.pod()) == "first"


async def test_each_audience_gets_a_token_of_the_pod_with_the_life_that_was_asked_for(api, drivers, fetch):
    drivers.set(tokenRequests=[{"audience": "vault", "expirationSeconds": 1200}, {"audience": ""}])
    extras = await fetch.for_publish(use(is_attachable=False), SOURCE)
    assert json.loads(extras.context[TOKENS_KEY]) == {
        "vault": {"token": "token-1", "expirationTimestamp": api.ends},
        "": {"token": "token-2", "expirationTimestamp": api.ends},
    }
    (path, first), (_, second) = api.asked
    assert path.endswith("/namespaces/ns/serviceaccounts/worker/token")
    assert first["spec"]["audiences"] == ["vault"]
    assert first["spec"]["expirationSeconds"] == 1200
    assert first["spec"]["boundObjectRef"] == {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "uid-p"}
    assert second["spec"]["audiences"] == []  # the server's own
    assert "expirationSeconds" not in second["spec"]


async def test_tokens_go_into_the_secrets_if_the_driver_says_so_and_never_to_a_block_volume(drivers, fetch):
    drivers.set(tokenRequests=[{"audience": "vault"}], serviceAccountTokenInSecrets=True)
    extras = await fetch.for_publish(use(is_attachable=False), SOURCE)
    assert TOKENS_KEY in extras.secrets
    assert TOKENS_KEY not in extras.context
    block = await fetch.for_publish(use(is_attachable=False), CsiSource("d", "h", "pv", is_block=True))
    assert TOKENS_KEY not in {**block.secrets, **block.context}


async def test_a_token_is_kept_for_four_fifths_of_its_life_and_at_most_a_day(api, fetch, monkeypatch):
    now = [1767225600.0]  # 2026-01-01T00:00:00Z
    monkeypatch.setattr(module.time, "time", lambda: now[0])

    async def token(**more):
        return (await fetch.token(more.get("pod", POD), more.get("audience", "a"), 3600))[0]

    assert [await token(), await token()] == ["token-1", "token-1"]
    assert await token(audience="b") == "token-2"
    assert await token(pod=PodRef(PodUid("uid-q"), "ns", "p", "worker")) == "token-3"  # made anew: another pod
    now[0] += 3600 * 0.8 - 1
    assert await token() == "token-1"
    now[0] += 2
    api.ends = "2026-02-01T00:00:00Z"
    assert await token() == "token-4"
    now[0] += 24 * 3600 + 1
    assert await token() == "token-5"
    fetch.forget_pod("uid-p")
    assert await token() == "token-6"


async def test_tokens_are_forgotten_when_their_pod_has_gone_although_nothing_was_published(api, drivers, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(module.time, "time", lambda: 1767225600.0)  # an hour before they end
    here = {POD.uid: 1.0, PodUid("uid-q"): 2.0}
    fetch = Fetch(api, "n", drivers, LiveClaims(api), lambda uid: here.get(uid, math.inf))

    async def tokens():
        other = PodRef(PodUid("uid-q"), "ns", "q", "worker")
        found = [(await fetch.token(pod, "a", 3600))[0] for pod in (POD, other)]
        await asyncio.sleep(0.01)
        return found

    assert await tokens() == ["token-1", "token-2"]
    assert await tokens() == ["token-1", "token-2"]
    del here[POD.uid]  # its volume was refused, so nobody unpublishes it
    await asyncio.sleep(0.01)
    here[POD.uid] = 3.0
    assert await tokens() == ["token-3", "token-2"]
    here.clear()
    await asyncio.sleep(0.01)
    assert fetch._tokens == {}
    assert fetch._next_look is None  # nothing is left to look after


async def test_tokens_that_have_ended_are_not_kept(api, drivers, monkeypatch):
    now = [1767225600.0]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    fetch = Fetch(api, "n", drivers, LiveClaims(api), lambda _uid: 1.0)
    await fetch.token(POD, "a", 3600)
    fetch.forget_gone()
    assert len(fetch._tokens) == 1
    now[0] += 3600
    fetch.forget_gone()
    assert fetch._tokens == {}


async def test_no_token_no_call(api, drivers, fetch):
    drivers.set(tokenRequests=[{"audience": "vault"}])
    api.token = ""
    assert await refused(fetch.for_publish(use(is_attachable=False), SOURCE), "without a token")
    api.fails = True
    assert await refused(fetch.for_publish(use(is_attachable=False), SOURCE), "no token for service account worker")
