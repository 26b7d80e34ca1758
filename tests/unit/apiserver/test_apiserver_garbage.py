"""Dependents follow their owners: background, foreground and orphaning deletion, and owners that cannot be known."""

import asyncio

MAPS = "/api/v1/namespaces/default/configmaps"
CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
PODS = "/api/v1/namespaces/default/pods"


def owned(name, *owners, kind="ConfigMap", blocks=False, **meta):
    references = [
        {"apiVersion": "v1", "kind": kind, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
         "blockOwnerDeletion": blocks}
        for owner in owners
    ]  # fmt: skip
    return {"metadata": {"name": name, "ownerReferences": references, **meta}}


async def gone(api, path):
    async with asyncio.timeout(10):
        while (await api("GET", path)).get("code") != 404:
            await asyncio.sleep(0.01)


async def at_rest(api):
    """The collector works off what a change left to do before it collects the dependents of this pair."""
    owner = await api.make(MAPS, {"metadata": {"name": "probe"}})
    await api.make(MAPS, owned("probe-child", owner))
    await api("DELETE", f"{MAPS}/probe", expect=200)
    await gone(api, f"{MAPS}/probe-child")


async def test_the_claim_of_an_ephemeral_volume_goes_with_its_pod(api, claim):
    spec = {"containers": [{"name": "main", "image": "app"}]}
    pod = await api.make(PODS, {"metadata": {"name": "pod"}, "spec": spec})
    body = claim("pod-scratch")
    body["metadata"] = owned("pod-scratch", pod, kind="Pod", blocks=True)["metadata"]
    await api.make(CLAIMS, body)
    await api("DELETE", f"{PODS}/pod", {"gracePeriodSeconds": 0}, expect=200)
    async with asyncio.timeout(10):
        while not (found := await api("GET", f"{CLAIMS}/pod-scratch"))["metadata"].get("deletionTimestamp"):
            await asyncio.sleep(0.01)
    assert found["metadata"]["finalizers"] == ["kubernetes.io/pvc-protection"]  # the protection controller's to remove
    await api.merge(f"{CLAIMS}/pod-scratch", {"metadata": {"finalizers": None}})
    await gone(api, f"{CLAIMS}/pod-scratch")


async def test_an_object_with_another_owner_stays_and_drops_the_first(api):
    first, second = [await api.make(MAPS, {"metadata": {"name": name}}) for name in ("first", "second")]
    await api.make(MAPS, owned("shared", first, second))
    await api.make(MAPS, owned("lone", first))
    await api("DELETE", f"{MAPS}/first", {"propagationPolicy": "Background"}, expect=200)
    await gone(api, f"{MAPS}/lone")
    await at_rest(api)
    shared = await api("GET", f"{MAPS}/shared", expect=200)
    assert [owner["uid"] for owner in shared["metadata"]["ownerReferences"]] == [second["metadata"]["uid"]]


async def test_a_foreground_deletion_ends_with_the_owner(api):
    owner = await api.make(MAPS, {"metadata": {"name": "owner"}})
    child = await api.make(MAPS, owned("child", owner, blocks=True))
    await api.make(MAPS, owned("grandchild", child, blocks=True, finalizers=["example.com/hold"]))
    await api("DELETE", f"{MAPS}/owner", {"propagationPolicy": "Foreground"}, expect=200)
    await at_rest(api)
    waiting = await api("GET", f"{MAPS}/owner", expect=200)
    assert waiting["metadata"]["deletionTimestamp"]  # it waits for its dependents
    await api.merge(f"{MAPS}/grandchild", {"metadata": {"finalizers": None}})
    for name in ("grandchild", "child", "owner"):
        await gone(api, f"{MAPS}/{name}")


async def test_orphans_stay(api):
    owner = await api.make(MAPS, {"metadata": {"name": "owner"}})
    await api.make(MAPS, owned("child", owner))
    await api("DELETE", f"{MAPS}/owner", {"propagationPolicy": "Orphan"}, expect=200)
    await gone(api, f"{MAPS}/owner")
    await at_rest(api)
    assert "ownerReferences" not in (await api("GET", f"{MAPS}/child", expect=200))["metadata"]


async def test_an_owner_of_a_kind_that_is_not_served_is_believed(api):
    reference = {
        "apiVersion": "example.com/v1",
        "kind": "Thing",
        "name": "x",
        "uid": "11111111-0000-0000-0000-000000000000",
    }
    await api.make(MAPS, {"metadata": {"name": "child", "ownerReferences": [reference]}})
    await at_rest(api)
    assert await api("GET", f"{MAPS}/child", expect=200)
