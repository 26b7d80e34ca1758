"""A pod's account: its token volume, as kube-apiserver 1.37 adds it, and who is recorded as the writer of what."""

import pytest

PODS = "/api/v1/namespaces/default/pods"
MAPS = "/api/v1/namespaces/default/configmaps"
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
PATH = "/var/run/secrets/kubernetes.io/serviceaccount"


def pod(name, **spec):
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "a", "image": "x"}], **spec}}


def mounts(container):
    return [mount["mountPath"] for mount in container.get("volumeMounts", [])]


async def test_every_container_finds_its_token_at_the_usual_path(api):
    both = [{"name": "a", "image": "x"}, {"name": "b", "image": "x"}]
    spec = (await api.make(PODS, pod("p", containers=both, initContainers=[{"name": "i", "image": "x"}])))["spec"]
    (volume,) = spec["volumes"]
    assert volume["name"].startswith("kube-api-access-")
    assert len(volume["name"]) == len("kube-api-access-") + 5
    assert volume["projected"] == {
        "defaultMode": 420,
        "sources": [
            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {
                "downwardAPI": {
                    "items": [
                        {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
                    ]
                }
            },
        ],
    }
    expected = {"name": volume["name"], "readOnly": True, "mountPath": PATH}
    for container in [*spec["containers"], *spec["initContainers"]]:
        assert container["volumeMounts"] == [expected]
    assert (await api("GET", f"{MAPS}/kube-root-ca.crt", expect=200))["data"]["ca.crt"]
    bound = {"kind": "Pod", "apiVersion": "v1", "name": "p"}
    asked = {"spec": {"expirationSeconds": 3607, "boundObjectRef": bound}}
    assert (await api("POST", f"{ACCOUNTS}/default/token", asked, expect=201))["status"]["token"]


@pytest.mark.parametrize(
    ("account", "wish", "is_mounted"),
    [(None, None, True), (None, False, False), (False, None, False), (False, True, True), (True, False, False)],
)
async def test_the_pod_has_the_last_word_and_then_its_account(api, account, wish, is_mounted):
    await api.make(ACCOUNTS, {"metadata": {"name": "x"}, "automountServiceAccountToken": account})
    made = await api.make(PODS, pod("p", serviceAccountName="x", automountServiceAccountToken=wish))
    assert (PATH in mounts(made["spec"]["containers"][0])) is is_mounted
    assert ("volumes" in made["spec"]) is is_mounted


async def test_what_is_mounted_there_already_stays(api):
    own = {"name": "a", "image": "x", "volumeMounts": [{"name": "v", "mountPath": PATH}]}
    scratch = [{"name": "v", "emptyDir": {}}]
    alone = await api.make(PODS, pod("p", containers=[own], volumes=scratch))
    assert [volume["name"] for volume in alone["spec"]["volumes"]] == ["v"]
    other = await api.make(PODS, pod("q", containers=[own, {"name": "b", "image": "x"}], volumes=scratch))
    assert len(other["spec"]["volumes"]) == 2
    assert [mount["name"] for mount in other["spec"]["containers"][0]["volumeMounts"]] == ["v"]
    again = {"metadata": {"name": "r"}, "spec": {**other["spec"], "nodeName": ""}}
    copied = await api.make(PODS, again)
    assert copied["spec"]["volumes"] == other["spec"]["volumes"], "a pod made from another one keeps its volume"


async def test_the_account_must_be_there_and_lends_its_image_secrets(api):
    refusal = await api("POST", PODS, pod("p", serviceAccountName="nobody"), expect=403)
    assert 'error looking up service account default/nobody: serviceaccount "nobody" not found' in refusal["message"]
    await api.make(ACCOUNTS, {"metadata": {"name": "x"}, "imagePullSecrets": [{"name": "registry"}]})
    made = await api.make(PODS, pod("p", serviceAccount="x"))
    assert (made["spec"]["serviceAccountName"], made["spec"]["imagePullSecrets"]) == ("x", [{"name": "registry"}])


async def test_a_mirror_pod_has_no_account(api):
    body = pod("p", nodeName="n")
    body["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "hash"}
    assert not {"serviceAccountName", "volumes"} & set((await api.make(PODS, body))["spec"])
    body["spec"]["serviceAccountName"] = "default"
    await api("POST", PODS, {**body, "metadata": {**body["metadata"], "name": "q"}}, expect=403)


async def test_every_write_has_its_writer(api):
    agent = {"User-Agent": "editor/v1.2 (linux)"}
    body = {"metadata": {"name": "m", "labels": {"a": "b"}}, "data": {"k": "1"}}
    made = await api("POST", MAPS, body, expect=201, headers=agent)
    (first,) = made["metadata"]["managedFields"]
    assert (first["manager"], first["operation"], first["apiVersion"]) == ("editor", "Update", "v1")
    labels = {"f:labels": {".": {}, "f:a": {}}}
    assert first["fieldsV1"] == {"f:data": {".": {}, "f:k": {}}, "f:metadata": labels}
    await api.merge(f"{MAPS}/m?fieldManager=other", {"data": {"k": "2", "l": "1"}})
    entries = (await api("GET", f"{MAPS}/m"))["metadata"]["managedFields"]
    assert {one["manager"]: one["fieldsV1"] for one in entries} == {
        "editor": {"f:data": {}, "f:metadata": labels},
        "other": {"f:data": {"f:k": {}, "f:l": {}}},
    }


async def test_what_an_empty_pod_has_is_nobodys_and_status_has_an_entry_of_its_own(api):
    made = await api.make(f"{PODS}?fieldManager=maker", pod("p"))
    (entry,) = made["metadata"]["managedFields"]
    container = {".": {}} | {
        f"f:{name}": {}
        for name in ("image", "imagePullPolicy", "name", "resources", "terminationMessagePath",
                     "terminationMessagePolicy")
    }  # fmt: skip
    spec = {"f:containers": {'k:{"name":"a"}': container}}
    spec |= {
        f"f:{name}": {}
        for name in ("dnsPolicy", "enableServiceLinks", "restartPolicy", "schedulerName", "securityContext",
                     "terminationGracePeriodSeconds")
    }  # fmt: skip
    assert entry["fieldsV1"] == {"f:spec": spec}
    status = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
    changed = await api.merge(f"{PODS}/p/status?fieldManager=node", status)
    (_, second) = changed["metadata"]["managedFields"]
    assert (second["manager"], second["subresource"]) == ("node", "status")
    assert set(second["fieldsV1"]["f:status"]) == {"f:conditions", "f:phase"}
