"""Pods, namespaces, owners, events, custom kinds, tables and reviews."""

import asyncio
import json

import pytest

PODS = "/api/v1/namespaces/default/pods"
MAPS = "/api/v1/namespaces/default/configmaps"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


def pod(name, **meta):
    return {"metadata": {"name": name, **meta}, "spec": {"containers": [{"name": "a", "image": "host"}]}}


async def until(ask, fits, seconds=20):
    async with asyncio.timeout(seconds):
        while not fits(answer := await ask()):
            await asyncio.sleep(0.02)
    return answer


async def bind(api, name, node="n1", expect=201):
    body = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
    return await api("POST", f"{PODS}/{name}/binding", body, expect=expect)


async def test_a_pod_gets_what_admission_gives(api):
    made = await api.make(PODS, pod("p"))
    spec = made["spec"]
    assert (spec["restartPolicy"], spec["serviceAccountName"], spec["priority"]) == ("Always", "default", 0)
    assert {t["key"] for t in spec["tolerations"]} == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    assert made["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    refusal = await api("POST", PODS, {**pod("q"), "spec": {**spec, "priorityClassName": "none"}}, expect=403)
    assert refusal["reason"] == "Forbidden"


async def test_binding_gives_a_pod_its_node_once(api):
    await api.make(PODS, pod("p"))
    await bind(api, "p")
    bound = await api("GET", f"{PODS}/p")
    assert bound["spec"]["nodeName"] == "n1"
    assert bound["status"]["conditions"][0]["type"] == "PodScheduled"
    assert (await bind(api, "p", "n2", expect=409))["reason"] == "Conflict"
    found = await api("GET", f"{PODS}?fieldSelector=spec.nodeName%3Dn1", expect=200)
    assert [item["metadata"]["name"] for item in found["items"]] == ["p"]


async def test_a_scheduled_pod_goes_gracefully_and_an_unscheduled_one_at_once(api):
    await api.make(PODS, pod("waiting"))
    await api("DELETE", f"{PODS}/waiting", expect=200)
    await api("GET", f"{PODS}/waiting", expect=404)
    await api.make(PODS, pod("running"))
    await bind(api, "running")
    going = await api("DELETE", f"{PODS}/running", {"gracePeriodSeconds": 20}, expect=200)
    assert going["metadata"]["deletionGracePeriodSeconds"] == 20
    longer = await api("DELETE", f"{PODS}/running", {"gracePeriodSeconds": 60}, expect=200)
    assert longer["metadata"]["deletionGracePeriodSeconds"] == 20
    await api("DELETE", f"{PODS}/running", {"gracePeriodSeconds": 0}, expect=200)
    await api("GET", f"{PODS}/running", expect=404)


async def test_an_eviction_asks_the_budget_first(api):
    await api.make(PODS, pod("p", labels={"app": "a"}))
    await bind(api, "p")
    await api.merge(f"{PODS}/p/status", {"status": {"phase": "Running"}})
    budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    await api.make(budgets, {"metadata": {"name": "b"}, "spec": {"selector": {"matchLabels": {"app": "a"}}}})
    await api("POST", f"{PODS}/p/eviction", {"metadata": {"name": "p"}}, expect=429)
    await api.merge(f"{budgets}/b/status", {"status": {"disruptionsAllowed": 1}})
    await api("POST", f"{PODS}/p/eviction", {"metadata": {"name": "p"}}, expect=201)
    assert (await api("GET", f"{PODS}/p"))["metadata"]["deletionTimestamp"]


ENDED = {"terminated": {"exitCode": 0}}
FAILED = {"terminated": {"exitCode": 3}}
RULE = {"action": "Restart", "exitCodes": {"operator": "In", "values": [0]}}


@pytest.mark.parametrize(
    ("policy", "container", "state", "is_refused"),
    [
        ("Always", {}, ENDED, False),
        ("OnFailure", {}, ENDED, True),
        ("OnFailure", {}, FAILED, False),
        ("OnFailure", {}, {"running": {}}, False),
        ("Never", {}, FAILED, True),
        ("Never", {"restartPolicy": "Always"}, ENDED, False),
        ("Never", {"restartPolicy": "OnFailure"}, FAILED, False),
        ("Always", {"restartPolicy": "Never"}, FAILED, True),
        ("Never", {"restartPolicy": "Never", "restartPolicyRules": [RULE]}, ENDED, False),
        ("Never", {"restartPolicy": "Never", "restartPolicyRules": [RULE]}, FAILED, True),
        ("Never", {"restartPolicyRules": [{"action": "RestartAllContainers"}]}, FAILED, False),
    ],
)
@pytest.mark.parametrize("part", ["container", "initContainer"])
async def test_a_container_that_is_over_and_not_to_be_restarted_stays_so(
    api, policy, container, state, is_refused, part
):
    own = {"name": "c", "image": "host", **container}
    spec = {"restartPolicy": policy, "containers": [{"name": "other", "image": "host"}], f"{part}s": [own]}
    await api.make(PODS, {"metadata": {"name": "p"}, "spec": spec})
    await api.merge(f"{PODS}/p/status", {"status": {f"{part}Statuses": [{"name": "c", "state": state}]}})
    again = {"status": {f"{part}Statuses": [{"name": "c", "state": {"waiting": {"reason": "ContainerCreating"}}}]}}
    answer = await api.merge(f"{PODS}/p/status", again, expect=422 if is_refused else 200)
    if is_refused:
        assert f"status.{part}Statuses[0].state: Forbidden: may not be transitioned" in answer["message"]


async def test_preconditions_of_a_delete_must_hold(api):
    made = await api.make(MAPS, {"metadata": {"name": "a"}})
    await api("DELETE", f"{MAPS}/a", {"preconditions": {"uid": "other"}}, expect=409)
    await api("DELETE", f"{MAPS}/a", {"preconditions": {"resourceVersion": "1"}}, expect=409)
    await api("DELETE", f"{MAPS}/a", {"preconditions": {"uid": made["metadata"]["uid"]}}, expect=200)


async def test_a_namespace_goes_with_all_it_holds(api):
    await api.make("/api/v1/namespaces", {"metadata": {"name": "team"}})
    await until(lambda: api("GET", "/api/v1/namespaces/team/serviceaccounts/default"), lambda a: a["kind"] != "Status")
    held = {"metadata": {"name": "m", "finalizers": ["example.com/hold"]}}
    await api.make("/api/v1/namespaces/team/configmaps", held)
    going = await api("DELETE", "/api/v1/namespaces/team", expect=200)
    assert going["status"]["phase"] == "Terminating"
    refusal = await api("POST", "/api/v1/namespaces/team/configmaps", {"metadata": {"name": "n"}}, expect=403)
    assert refusal["details"]["causes"][0]["reason"] == "NamespaceTerminating"
    await api.merge("/api/v1/namespaces/team/configmaps/m", {"metadata": {"finalizers": None}})
    await until(lambda: api("GET", "/api/v1/namespaces/team"), lambda a: a.get("code") == 404)
    assert (await api("DELETE", "/api/v1/namespaces/default", expect=403))["reason"] == "Forbidden"


async def test_dependents_follow_their_owner_unless_they_are_orphaned(api):
    owners = []
    for name in ("keeps", "drops"):
        owner = await api.make(MAPS, {"metadata": {"name": name}})
        ref = {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": owner["metadata"]["uid"]}
        await api.make(MAPS, {"metadata": {"name": f"{name}-child", "ownerReferences": [ref]}})
        owners.append(name)
    await api("DELETE", f"{MAPS}/drops", expect=200)
    await until(lambda: api("GET", f"{MAPS}/drops-child"), lambda a: a.get("code") == 404)
    await api("DELETE", f"{MAPS}/keeps", {"propagationPolicy": "Orphan"}, expect=200)
    await until(lambda: api("GET", f"{MAPS}/keeps"), lambda a: a.get("code") == 404)
    child = await api("GET", f"{MAPS}/keeps-child", expect=200)
    assert "ownerReferences" not in child["metadata"]


async def test_events_have_two_faces(api):
    event = {"metadata": {"name": "e"}, "reason": "Why", "note": "words", "type": "Normal", "action": "Act",
             "regarding": {"kind": "Pod", "name": "p", "namespace": "default"}, "reportingController": "c",
             "reportingInstance": "c-1", "eventTime": "2026-01-01T00:00:00.000000Z"}  # fmt: skip
    await api.make("/apis/events.k8s.io/v1/namespaces/default/events", event)
    core = await api("GET", "/api/v1/namespaces/default/events/e", expect=200)
    assert (core["message"], core["involvedObject"]["name"], core["apiVersion"]) == ("words", "p", "v1")
    newer = await api("GET", "/apis/events.k8s.io/v1/namespaces/default/events", expect=200)
    assert newer["items"][0]["note"] == "words"
    picked = await api("GET", "/api/v1/events?fieldSelector=involvedObject.name%3Dp,reason%3DWhy", expect=200)
    assert len(picked["items"]) == 1


DEFINITION = {
    "metadata": {"name": "boats.example.com"},
    "spec": {
        "group": "example.com",
        "scope": "Namespaced",
        "names": {"kind": "Boat", "plural": "boats", "shortNames": ["bt"]},
        "versions": [{
            "name": "v1", "served": True, "storage": True, "subresources": {"status": {}, "scale": {
                "specReplicasPath": ".spec.crew", "statusReplicasPath": ".status.crew"}},
            "additionalPrinterColumns": [{"name": "Length", "type": "integer", "jsonPath": ".spec.length"}],
            "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                "spec": {"type": "object", "required": ["length"], "properties": {
                    "length": {"type": "integer", "minimum": 1}, "crew": {"type": "integer"},
                    "sail": {"type": "string", "enum": ["lateen", "square"], "default": "square"},
                    "name": {"type": "string", "x-kubernetes-validations": [
                        {"rule": "self == oldSelf", "message": "a name stays"}]}}},
                "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}},
        }],
    },
}  # fmt: skip
BOATS = "/apis/example.com/v1/namespaces/default/boats"


async def test_a_custom_kind_is_pruned_defaulted_validated_and_shown(api):
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    made = await api.make(crds, DEFINITION)
    assert {c["type"]: c["status"] for c in made["status"]["conditions"]}["Established"] == "True"
    boat = await api.make(BOATS, {"metadata": {"name": "b"}, "spec": {"length": 3, "name": "x", "bogus": 1}})
    assert boat["spec"] == {"length": 3, "name": "x", "sail": "square"}
    bad = (({}, "spec.length"), ({"length": 0}, "spec.length"), ({"length": 1, "sail": "gaff"}, "spec.sail"),
           ({"length": "long"}, "spec.length"))  # fmt: skip
    for spec, field in bad:
        refusal = await api("POST", BOATS, {"metadata": {"name": "c"}, "spec": spec}, expect=422)
        assert field in {cause["field"] for cause in refusal["details"]["causes"]}
    renamed = await api.merge(f"{BOATS}/b", {"spec": {"name": "y"}}, expect=422)
    assert "a name stays" in renamed["message"]
    status = await api.merge(f"{BOATS}/b/status", {"status": {"any": 1}, "spec": {"length": 9}})
    assert (status["status"], status["spec"]["length"]) == ({"any": 1}, 3)
    await api.merge(f"{BOATS}/b/scale", {"spec": {"replicas": 4}})
    assert (await api("GET", f"{BOATS}/b"))["spec"]["crew"] == 4
    table = await api("GET", BOATS, headers={"Accept": TABLE})
    assert [c["name"] for c in table["columnDefinitions"]] == ["Name", "Length"]
    assert table["rows"][0]["cells"] == ["b", 3]
    listed = await api("GET", "/apis/example.com/v1", expect=200)
    assert {r["name"] for r in listed["resources"]} == {"boats", "boats/status", "boats/scale"}
    await api("DELETE", f"{crds}/boats.example.com", expect=200)
    await api("GET", BOATS, expect=404)


async def test_snapshot_kinds_are_there_from_the_start_with_their_rules(api):
    path = "/apis/snapshot.storage.k8s.io/v1/namespaces/default/volumesnapshots"
    await api("POST", path, {"metadata": {"name": "s"}, "spec": {"source": {}}}, expect=422)
    source = {"persistentVolumeClaimName": "c"}
    await api.make(path, {"metadata": {"name": "s"}, "spec": {"source": source}})
    await api.merge(f"{path}/s", {"spec": {"source": {"persistentVolumeClaimName": "d"}}}, expect=422)
    done = await api.merge(f"{path}/s/status", {"status": {"readyToUse": True, "restoreSize": "1Gi"}})
    assert done["status"] == {"readyToUse": True, "restoreSize": "1Gi"}
    for version in ("v1beta1", "v1beta2", "v1"):
        groups = f"/apis/groupsnapshot.storage.k8s.io/{version}/namespaces/default/volumegroupsnapshots"
        spec = {"source": {"selector": {"matchLabels": {"a": "b"}}}}
        made = await api.make(groups, {"metadata": {"name": version}, "spec": spec})
        assert made["apiVersion"] == f"groupsnapshot.storage.k8s.io/{version}"


async def test_tables_have_the_columns_of_kubernetes(api, claim, volume):
    await api.make("/api/v1/namespaces/default/persistentvolumeclaims", claim("c"))
    table = await api("GET", "/api/v1/persistentvolumeclaims", headers={"Accept": TABLE})
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names == ["Name", "Status", "Volume", "Capacity", "Access Modes", "StorageClass", "VolumeAttributesClass",
                     "Age", "VolumeMode"]  # fmt: skip
    assert table["rows"][0]["cells"][:7] == ["c", "Pending", "", "", "", "", "<unset>"]
    assert table["rows"][0]["object"]["kind"] == "PartialObjectMetadata"
    await api.make("/api/v1/persistentvolumes", volume("v", claimRef={"namespace": "n", "name": "c"}))
    row = (await api("GET", "/api/v1/persistentvolumes/v", headers={"Accept": TABLE}))["rows"][0]["cells"]
    assert row[1:6] == ["1Gi", "RWO", "Retain", "Pending", "n/c"]


async def test_accounts_get_tokens_that_are_known_again(api):
    await until(
        lambda: api("GET", "/api/v1/namespaces/default/serviceaccounts/default"), lambda a: a["kind"] != "Status"
    )
    path = "/api/v1/namespaces/default/serviceaccounts/default/token"
    token = (await api("POST", path, {"spec": {"expirationSeconds": 600}}, expect=201))["status"]["token"]
    review = await api("POST", "/apis/authentication.k8s.io/v1/tokenreviews", {"spec": {"token": token}}, expect=201)
    assert review["status"]["user"]["username"] == "system:serviceaccount:default:default"
    who = await api("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", {}, expect=201,
                    headers={"Authorization": f"Bearer {token}"})  # fmt: skip
    assert who["status"]["userInfo"]["username"].endswith(":default")
    forged = token[:-4] + ("AAAA" if not token.endswith("AAAA") else "BBBB")
    await api("GET", MAPS, expect=401, headers={"Authorization": f"Bearer {forged}"})


async def test_discovery_tells_the_same_twice(api):
    legacy = await api("GET", "/apis", expect=200)
    async with api.session.get(
        "/apis", headers={"Accept": "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"}
    ) as response:
        assert "as=APIGroupDiscoveryList" in response.headers["Content-Type"]
        aggregated = json.loads(await response.text())
    assert [g["name"] for g in legacy["groups"]] == [g["metadata"]["name"] for g in aggregated["items"]]
    storage = await api("GET", "/apis/storage.k8s.io/v1")
    assert "volumeattachments/status" in {r["name"] for r in storage["resources"]}
