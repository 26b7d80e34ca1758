"""Quantities have one spelling once they are stored: a table that kube-apiserver 1.37 answered, and what follows."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moorage.apiserver.kinds.schema import Normaliser, WrongType, struct
from moorage.kube.quantity import Quantity, canonical_text

CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
PODS = "/api/v1/namespaces/default/pods"
TABLE = [json.loads(line) for line in (Path(__file__).parent / "stored_quantities.jsonl").read_text().splitlines()]


def _stored(kind, obj):
    try:
        return Normaliser(kind.rpartition(".")[2]).struct(obj, struct(kind), "")
    except WrongType:
        return None


def test_what_is_stored_is_what_kubernetes_stores():
    """Each row: what was sent, what a capacity became, what an amount of a resource became (None: refused)."""
    wrong = []
    for text, plain, amount in TABLE:
        capacity = _stored("storage.v1.CSIStorageCapacity", {"capacity": text})
        volume = _stored("core.v1.PersistentVolumeSpec", {"capacity": {"storage": text}})
        mine = [capacity and capacity["capacity"], volume and volume["capacity"]["storage"]]
        if mine != [plain, amount]:
            wrong.append((text, [plain, amount], mine))
    assert not wrong
    assert len(TABLE) > 160


texts = st.builds(
    lambda whole, fraction, suffix: f"{whole}{fraction}{suffix}",
    st.integers(0, 10**9),
    st.sampled_from(["", ".5", ".125", ".0004"]),
    st.sampled_from(["", "m", "k", "M", "G", "Ki", "Mi", "Gi", "Ti", "u", "e3", "e-2"]),
)


@given(texts, st.booleans())
@example("899869062.5Ki", False)
def test_storing_twice_is_storing_once_and_nothing_is_lost(text, is_amount):
    once = canonical_text(text, is_amount)
    twice = canonical_text(once, is_amount)
    before, after = Quantity.parse(text), Quantity.parse(once)
    if before.style == "BinarySI" and once.endswith("000"):  # nobody sees any more that this was no decimal number
        assert (once.isdigit(), Quantity.parse(twice)) == (True, after)
        assert canonical_text(twice, is_amount) == twice
    else:
        assert twice == once
    assert after.milli_value == before.milli_value
    assert is_amount or after == before


async def test_an_update_that_only_spells_a_size_otherwise_changes_nothing(api, claim):
    made = await api.make(CLAIMS, claim("a", resources={"requests": {"storage": "1024Mi"}}))
    assert made["spec"]["resources"]["requests"]["storage"] == "1Gi"
    for spelling in ("1048576Ki", "1.0Gi", "1Gi"):
        same = await api.merge(f"{CLAIMS}/a", {"spec": {"resources": {"requests": {"storage": spelling}}}})
        assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    status = {"phase": "Bound", "capacity": {"storage": "1024Mi"}, "allocatedResources": {"storage": "1.5Gi"}}
    bound = await api.merge(f"{CLAIMS}/a/status", {"status": status})
    assert (bound["status"]["capacity"], bound["status"]["allocatedResources"]) == (
        {"storage": "1Gi"},
        {"storage": "1536Mi"},
    )


async def test_appliers_that_mean_the_same_size_do_not_conflict(api, claim):
    body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    one = {**body, **claim("a", resources={"requests": {"storage": "1024Mi"}})}
    await api.apply(f"{CLAIMS}/a", one, "one", expect=201)
    again = await api.apply(f"{CLAIMS}/a", one, "one", expect=200)
    two = {**body, **claim("a", resources={"requests": {"storage": "1Gi"}})}
    shared = await api.apply(f"{CLAIMS}/a", two, "two", expect=200)
    assert shared["spec"] == again["spec"]
    other = {**body, **claim("a", resources={"requests": {"storage": "2Gi"}})}
    assert (await api.apply(f"{CLAIMS}/a", other, "two", expect=409))["reason"] == "Conflict"


async def test_a_custom_object_keeps_what_was_written(api):
    path = "/apis/snapshot.storage.k8s.io/v1/namespaces/default/volumesnapshots"
    source = {"source": {"persistentVolumeClaimName": "c"}}
    body = {"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": {"name": "s"}}
    await api.make(path, {**body, "spec": source})
    ready = await api.merge(f"{path}/s/status", {"status": {"readyToUse": True, "restoreSize": "1024Mi"}})
    assert ready["status"]["restoreSize"] == "1024Mi"


@pytest.mark.parametrize("text", ["much", "1gi", "1e", True, []])
async def test_what_is_no_quantity_is_a_bad_request(api, claim, text):
    refusal = await api("POST", CLAIMS, claim("a", resources={"requests": {"storage": text}}), expect=400)
    assert "quantit" in refusal["message"]


async def test_amounts_below_zero_are_refused_where_they_stand(api):
    container = {"name": "a", "image": "x", "resources": {"limits": {"memory": "-1Gi"}, "requests": {"cpu": "2000m"}}}
    scratch = {"name": "s", "emptyDir": {"sizeLimit": "-1"}}
    body = {"metadata": {"name": "p"}, "spec": {"containers": [container], "volumes": [scratch]}}
    refusal = await api("POST", PODS, body, expect=422)
    assert {cause["field"] for cause in refusal["details"]["causes"]} == {
        "spec.containers[0].resources.limits[memory]",
        "spec.containers[0].resources.requests[memory]",
        "spec.volumes[0].emptyDir.sizeLimit",
    }
