"""Tokens that should not count: another audience's, those of deleted accounts and pods, forged ones."""

import asyncio
import base64
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from tests.support.accounts import rule, serve_accounts

from moorage.apiserver.access import authentication
from moorage.apiserver.access.authentication import ISSUER

NS = "/api/v1/namespaces/default"
ACCOUNTS, PODS = f"{NS}/serviceaccounts", f"{NS}/pods"
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


@pytest.fixture
async def cluster(tmp_path):
    async with serve_accounts(tmp_path / "api") as accounts:
        yield accounts


@pytest.fixture
async def bob(cluster):
    return await cluster.account("bob", rule("get list", "configmaps"))


async def status_with(cluster, token):
    caller = await cluster.caller("", token)
    return (await caller("GET", f"{NS}/configmaps"))[0]


async def review(cluster, token, audiences=None):
    spec = {"token": token, **({"audiences": audiences} if audiences else {})}
    return (await cluster.admin.make(REVIEWS, {"spec": spec}))["status"]


async def test_a_token_for_another_audience_does_not_open_the_api(cluster, bob):
    vault = await cluster.token("bob", audiences=["vault"])
    assert await status_with(cluster, vault) == 401
    assert await status_with(cluster, bob.token) == 200
    assert await status_with(cluster, await cluster.token("bob", audiences=["vault", ISSUER])) == 200
    assert not (await review(cluster, vault))["authenticated"]
    assert not (await review(cluster, vault, ["other"]))["authenticated"]
    assert (await review(cluster, vault, ["other", "vault"]))["audiences"] == ["vault"]
    assert not (await review(cluster, bob.token, ["vault"]))["authenticated"]
    assert (await review(cluster, bob.token))["audiences"] == [ISSUER]
    assert not (await review(cluster, cluster.server.token, ["vault"]))["authenticated"]


async def test_the_token_of_a_deleted_account_ends_with_it(cluster, bob):
    assert await status_with(cluster, bob.token) == 200
    assert (await cluster.admin("DELETE", f"{ACCOUNTS}/bob"))[0] == 200
    assert await status_with(cluster, bob.token) == 401
    assert not (await review(cluster, bob.token))["authenticated"]
    await cluster.admin.make(ACCOUNTS, {"metadata": {"name": "bob"}})
    assert await status_with(cluster, bob.token) == 401, "another account of the same name"
    assert await status_with(cluster, await cluster.token("bob")) == 200


@pytest.mark.parametrize(("kind", "path"), [("Pod", PODS), ("Secret", f"{NS}/secrets"), ("Node", "/api/v1/nodes")])
async def test_a_bound_token_ends_with_its_object(cluster, bob, kind, path):
    bodies = {"Pod": {"spec": {"serviceAccountName": "bob", "containers": [{"name": "c", "image": "x"}]}}}
    body = {"metadata": {"name": "p"}, **bodies.get(kind, {})}
    made = await cluster.admin.make(path, body)
    ref = {"kind": kind, "apiVersion": "v1", "name": "p"}
    token = await cluster.token("bob", boundObjectRef=ref)
    assert await status_with(cluster, token) == 200
    extra = (await review(cluster, token))["user"]["extra"]
    if kind == "Pod":
        assert extra["authentication.kubernetes.io/pod-uid"] == [made["metadata"]["uid"]]
    assert (await cluster.admin("DELETE", f"{path}/p?gracePeriodSeconds=0"))[0] == 200
    assert await status_with(cluster, token) == 401
    await cluster.admin.make(path, body)
    assert await status_with(cluster, token) == 401, "another object of the same name"


async def test_a_pod_that_ends_keeps_its_token_for_a_minute(cluster, bob, monkeypatch):
    spec = {"serviceAccountName": "bob", "nodeName": "n", "containers": [{"name": "c", "image": "x"}]}
    await cluster.admin.make(PODS, {"metadata": {"name": "p"}, "spec": spec})
    token = await cluster.token("bob", boundObjectRef={"kind": "Pod", "name": "p"})
    assert (await cluster.admin("DELETE", f"{PODS}/p?gracePeriodSeconds=1"))[0] == 200
    assert await status_with(cluster, token) == 200
    monkeypatch.setattr(authentication, "_AFTER_DELETION_S", -10.0)
    assert await status_with(cluster, token) == 401


async def test_a_token_is_bound_only_to_what_the_account_has(cluster, bob):
    spec = {"containers": [{"name": "c", "image": "x"}]}
    pod = await cluster.admin.make(PODS, {"metadata": {"name": "p"}, "spec": spec})
    for asked, expected in (
        ({"boundObjectRef": {"kind": "Pod", "name": "p"}}, 400),
        ({"boundObjectRef": {"kind": "Pod", "name": "none"}}, 404),
        ({"boundObjectRef": {"kind": "ConfigMap", "name": "x"}}, 400),
        ({"boundObjectRef": "p"}, 400),
        ({"boundObjectRef": {"kind": "Pod", "name": "p", "uid": pod["metadata"]["uid"][:-1] + "x"}}, 400),
        ({"audiences": "vault"}, 400),
        ({"audiences": [1]}, 400),
        ({"expirationSeconds": 599}, 422),
        ({"expirationSeconds": 1 << 40}, 422),
        ({"expirationSeconds": "3600"}, 400),
        ({"expirationSeconds": True}, 400),
    ):
        assert (await cluster.admin("POST", f"{ACCOUNTS}/bob/token", {"spec": asked}))[0] == expected, asked


def forged(cluster, bob, **changes):
    """The account's claims with some changed, signed with the server's own key."""
    claims = jwt.decode(bob.token, options={"verify_signature": False})
    claims = {key: value for key, value in {**claims, **changes}.items() if value is not None}
    return jwt.encode(claims, cluster.server.identity.signing_key.read_bytes(), "ES256")


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1}, {"exp": None}, {"nbf": int(time.time()) + 3600}, {"nbf": None}, {"iss": "https://evil"},
        {"iss": None}, {"aud": None}, {"aud": []}, {"aud": [ISSUER + "x"]},
        {"sub": "system:serviceaccount:kube-system:default"},
        {"sub": None}, {"kubernetes.io": None}, {"kubernetes.io": []}, {"exp": "soon"}, {"aud": {"a": 1}},
        {"kubernetes.io": {"namespace": "default", "serviceaccount": {"name": "bob", "uid": "another"}}},
        {"kubernetes.io": {"namespace": "default", "serviceaccount": {"name": "bob"}}},
    ],
)  # fmt: skip
async def test_each_claim_is_checked(cluster, bob, changes):
    assert await status_with(cluster, forged(cluster, bob)) == 200
    assert await status_with(cluster, forged(cluster, bob, **changes)) == 401


async def test_only_our_key_and_algorithm_count(cluster, bob):
    claims = jwt.decode(bob.token, options={"verify_signature": False})
    other = jwt.encode(claims, ec.generate_private_key(ec.SECP256R1()), "ES256")
    head, body, signature = bob.token.split(".")
    none = base64.urlsafe_b64encode(json.dumps({"alg": "none", "typ": "JWT"}).encode()).decode().rstrip("=")
    public = cluster.server.identity.ca.read_bytes()
    hs256 = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "typ": "JWT"}).encode()).decode().rstrip("=")
    import hashlib
    import hmac

    mac = hmac.new(public, f"{hs256}.{body}".encode(), hashlib.sha256).digest()
    confused = f"{hs256}.{body}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"
    flipped = f"{head}.{body}.{signature[:-4]}AAAA"
    for token in (other, f"{none}.{body}.", confused, flipped, f"{head}.{body}", "..", "a.b.c", "é.é.é", "x" * 5000):
        caller = await cluster.caller("", "")
        assert (await caller("GET", f"{NS}/configmaps", Authorization=f"Bearer {token}"))[0] == 401, token[:40]


async def test_a_token_that_ends_while_it_is_known_ends_at_once(cluster, bob):
    token = forged(cluster, bob, exp=int(time.time()) + 2)
    assert await status_with(cluster, token) == 200
    async with asyncio.timeout(20):
        while await status_with(cluster, token) == 200:
            await asyncio.sleep(0.1)
