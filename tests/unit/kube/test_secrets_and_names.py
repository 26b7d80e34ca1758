"""Secrets that classes name with templates, leases under their official names, and kinds that may be missing."""

import asyncio
import base64

import pytest

from moorage.kube import secrets
from moorage.kube.api.client import Client
from moorage.kube.api.config import from_values
from moorage.kube.api.discovery import is_served, wait_served
from moorage.kube.errors import Unavailable
from moorage.kube.names import lease_name
from moorage.kube.objects import SecretReference, VolumeSnapshot
from moorage.kube.secrets import BadSecret, MissingSecret, expand, read_secret, reference_from

TOKENS = {"pvc.name": "data", "pvc.namespace": "prod", "pvc.annotations['a/b']": "x1", "simple": "s"}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("plain", "plain"),
        ("${pvc.name}-key", "data-key"),
        ("${pvc.annotations['a/b']}", "x1"),
        ("${pvc.namespace}.${pvc.name}", "prod.data"),
        ("$simple-key", "s-key"),
    ],
)
def test_tokens_are_replaced_with_and_without_braces(template, text):
    assert expand(template, TOKENS) == text


@pytest.mark.parametrize("template", ["${nobody}", "$nobody", "$$", "${}"])
def test_unknown_tokens_are_named(template):
    with pytest.raises(BadSecret, match="unknown tokens"):
        expand(template, TOKENS)


def test_a_pair_is_whole_or_absent_and_old_and_new_do_not_mix():
    keys = secrets.PROVISION
    assert reference_from({}, keys, TOKENS, TOKENS) is None
    with pytest.raises(BadSecret, match="must both be set"):
        reference_from({keys.name: "a"}, keys, TOKENS, TOKENS)
    both = {keys.name: "a", keys.namespace: "b", keys.old_name: "c", keys.old_namespace: "d"}
    with pytest.raises(BadSecret, match="deprecated"):
        reference_from(both, keys, TOKENS, TOKENS)
    fallback = {secrets.DEFAULT.name: "all", secrets.DEFAULT.namespace: "ns"}
    found = reference_from(fallback, keys, TOKENS, TOKENS, secrets.DEFAULT)
    assert found is not None
    assert (found.name, found.namespace) == ("all", "ns")


@pytest.mark.parametrize(
    ("name", "namespace"), [("a/b", "ns"), ("A", "ns"), ("a", "n.s"), ("a", "../x"), ("a" * 254, "ns")]
)
def test_what_comes_out_must_be_a_name(name, namespace):
    keys = secrets.SNAPSHOT
    with pytest.raises(BadSecret, match="which is not"):
        reference_from({keys.name: name, keys.namespace: namespace}, keys, {}, {})


def test_a_secret_is_read_as_text_and_its_values_are_in_no_error(virtual, fake):
    path = "/api/v1/namespaces/ns/secrets"

    async def story():
        async with fake() as api, api.client() as client:
            api.put(f"{path}/good", data={"key": base64.b64encode(b"value").decode()})
            api.put(f"{path}/bad", data={"key": base64.b64encode(b"\xff\xfehidden").decode()})
            assert await read_secret(client, None) == {}
            assert await read_secret(client, SecretReference(name="good", namespace="ns")) == {"key": "value"}
            with pytest.raises(MissingSecret, match="ns/none does not exist"):
                await read_secret(client, SecretReference(name="none", namespace="ns"))
            with pytest.raises(BadSecret) as caught:
                await read_secret(client, SecretReference(name="bad", namespace="ns"))
            assert "hidden" not in str(caught.value)

    virtual(story)


@pytest.mark.parametrize(
    ("role", "driver", "name"),
    [
        ("provisioner", "a.b/c", "a-b-c"),
        ("attacher", "a.b", "external-attacher-leader-a-b"),
        ("resizer", "a.b", "external-resizer-a-b"),
        ("snapshotter", "a.b-", "external-snapshotter-leader-a-b-X"),
        ("health", "a.b", "external-health-monitor-leader-a-b"),
        ("capacity", "a.b", "external-capacity-a-b"),
        ("registrar", "a.b", ""),
    ],
)
def test_leases_have_their_official_names(role, driver, name):
    assert lease_name(role, driver) == name


class Answers(Client):
    """A client that gives one answer after the other."""

    def __init__(self, *answers):
        super().__init__(from_values("http://127.0.0.1:1"))
        self.answers = list(answers)

    async def request(self, method, path, body=None, **options):
        assert (method, path) == ("GET", "/apis/snapshot.storage.k8s.io/v1")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


WITH, WITHOUT = b'{"resources": [{"name": "volumesnapshots"}]}', b'{"resources": []}'


async def test_a_kind_is_served_when_its_group_lists_it():
    assert await is_served(Answers(WITH), VolumeSnapshot)
    assert not await is_served(Answers(WITHOUT), VolumeSnapshot)
    with pytest.raises(Unavailable):
        await is_served(Answers(Unavailable(503, "", "away")), VolumeSnapshot)
    assert await is_served(Answers(Unavailable(503, "", "away"), WITH), VolumeSnapshot, retries=True)


def test_a_kind_that_is_installed_later_is_waited_for(virtual):
    async def story():
        client = Answers(WITHOUT, Unavailable(503, "", "away"), WITHOUT, WITH)
        async with asyncio.timeout(10):
            await wait_served(client, VolumeSnapshot)
        assert client.answers == []

    virtual(story)
