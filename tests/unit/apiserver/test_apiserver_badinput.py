"""Whatever is sent, the answer is a Status with the right code, and never a 500."""

import asyncio
import json

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage.testing import serve

MERGING = {"Content-Type": "application/merge-patch+json"}
MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "http", "reason"),
    [
        ("POST", MAPS, "{", "application/json", 400, "BadRequest"),
        ("POST", MAPS, "[]", "application/json", 400, "BadRequest"),
        ("POST", MAPS, "a: [", "application/yaml", 400, "BadRequest"),
        ("POST", MAPS, "a: &x [1]\nb: *x", "application/yaml", 400, "BadRequest"),
        ("POST", MAPS, "{}", "text/html", 415, "UnsupportedMediaType"),
        ("POST", MAPS, "k8s\0garbage", "application/vnd.kubernetes.protobuf", 400, "BadRequest"),
        ("POST", MAPS, "\0", "application/cbor", 415, "UnsupportedMediaType"),
        ("POST", MAPS, '{"kind":"Pod","apiVersion":"v1"}', "application/json", 400, "BadRequest"),
        ("POST", MAPS, '{"kind":"ConfigMap","apiVersion":"v2"}', "application/json", 400, "BadRequest"),
        ("POST", MAPS, '{"metadata":{"name":"Not A Name"}}', "application/json", 422, "Invalid"),
        ("POST", MAPS, '{"metadata":{}}', "application/json", 422, "Invalid"),
        ("POST", MAPS, '{"metadata":{"name":"a","namespace":"other"}}', "application/json", 400, "BadRequest"),
        ("POST", MAPS, '{"metadata":{"name":"a","labels":{"a b":"c"}}}', "application/json", 422, "Invalid"),
        ("POST", MAPS, '{"metadata":{"name":"a","resourceVersion":"1"}}', "application/json", 400, "BadRequest"),
        ("POST", MAPS, '{"metadata":{"name":"a"},"data":{"k":1}}', "application/json", 400, "BadRequest"),
        ("POST", "/api/v1/namespaces/no/configmaps", '{"metadata":{"name":"a"}}', "application/json", 404, "NotFound"),
        ("GET", "/api/v1/namespaces/default/nothings", None, "application/json", 404, "NotFound"),
        ("GET", "/apis/no.group/v1", None, "application/json", 404, "NotFound"),
        ("GET", MAPS + "?labelSelector=a+in+b", None, "application/json", 400, "BadRequest"),
        ("GET", MAPS + "?fieldSelector=spec.x%3D1", None, "application/json", 400, "BadRequest"),
        ("GET", MAPS + "?limit=many", None, "application/json", 400, "BadRequest"),
        ("GET", MAPS + "?continue=%21%21", None, "application/json", 400, "BadRequest"),
        ("GET", MAPS + "?resourceVersion=x", None, "application/json", 400, "BadRequest"),
        ("PATCH", MAPS + "/kube-root-ca.crt", "{}", "application/json", 415, "UnsupportedMediaType"),
        ("PATCH", MAPS + "/none", "{}", "application/merge-patch+json", 404, "NotFound"),
        ("PUT", MAPS + "/a", '{"metadata":{"name":"b"}}', "application/json", 400, "BadRequest"),
        ("PUT", MAPS, "{}", "application/json", 405, "MethodNotAllowed"),
        ("POST", MAPS + "/a", "{}", "application/json", 405, "MethodNotAllowed"),
        ("DELETE", MAPS + "/a", '{"propagationPolicy":"Sideways"}', "application/json", 422, "Invalid"),
    ],
)  # fmt: skip
async def test_bad_requests_get_the_answer_of_kubernetes(api, method, path, body, kind, http, reason):
    answer = await api(method, path, body, expect=http, kind=kind)
    assert (answer["kind"], answer["status"], answer["reason"], answer["code"]) == ("Status", "Failure", reason, http)


async def test_unknown_fields_are_refused_warned_about_or_ignored(api):
    body = {"metadata": {"name": "a"}, "bogus": 1}
    refusal = await api("POST", MAPS + "?fieldValidation=Strict", body, expect=400)
    assert 'unknown field "bogus"' in refusal["message"]
    async with api.session.post(MAPS, json=body) as response:
        assert response.status == 201
        assert 'unknown field \\"bogus\\"' in response.headers["Warning"]
        assert "bogus" not in await response.json()
    body["metadata"]["name"] = "b"
    async with api.session.post(MAPS + "?fieldValidation=Ignore", json=body) as response:
        assert (response.status, response.headers.get("Warning")) == (201, None)


@pytest.mark.parametrize(
    ("path", "kind", "is_warned"),
    [
        ("/apis/apps/v1/namespaces/default/deployments", "Deployment", True),
        ("/apis/apps/v1/namespaces/default/statefulsets", "StatefulSet", True),
        ("/apis/apps/v1/namespaces/default/daemonsets", "DaemonSet", True),
        ("/apis/apps/v1/namespaces/default/replicasets", "ReplicaSet", True),
        ("/apis/batch/v1/namespaces/default/jobs", "Job", True),
        ("/apis/batch/v1/namespaces/default/cronjobs", "CronJob", True),
        (MAPS, "ConfigMap", False),
    ],
)
async def test_what_no_controller_runs_is_accepted_with_a_warning(api, path, kind, is_warned):
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    spec = {"selector": {"matchLabels": {"a": "b"}}, "template": template} if "/apps/" in path else {}
    async with api.session.post(path, json={"metadata": {"name": "a"}, "spec": spec}) as response:
        assert response.status == 201
        warning = response.headers.get("Warning", "")
        assert (f"this {kind} makes no pods here" in warning) == is_warned
    async with api.session.patch(path + "/a", json={"metadata": {"labels": {"a": "b"}}}, headers=MERGING) as response:
        assert (response.status, response.headers.get("Warning")) == (200, None)  # told once


async def test_a_client_that_wants_only_protobuf_is_told_so_and_one_with_a_fallback_gets_json(api):
    media = "application/vnd.kubernetes.protobuf"
    await api("GET", MAPS, expect=406, headers={"Accept": media})
    both = await api("GET", MAPS, expect=200, headers={"Accept": f"{media},application/cbor,application/json"})
    assert both["kind"] == "ConfigMapList"


async def test_a_dry_run_stores_nothing(api):
    made = await api("POST", MAPS + "?dryRun=All", {"metadata": {"generateName": "x-"}}, expect=201)
    assert made["metadata"]["name"].startswith("x-")
    await api("GET", f"{MAPS}/{made['metadata']['name']}", expect=404)
    await api("POST", MAPS + "?dryRun=Some", {"metadata": {"name": "y"}}, expect=422)


async def test_depth_and_size_have_their_limits_too(api):
    crd = {"metadata": {"name": "bags.example.com"}, "spec": {
        "group": "example.com", "scope": "Namespaced", "names": {"kind": "Bag", "plural": "bags"}, "versions": [{
            "name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": True}}}]}}  # fmt: skip
    await api.make("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    bags = "/apis/example.com/v1/namespaces/default/bags"
    await api.make(bags, {"metadata": {"name": "b"}, "x": 1})
    for depth in (100, 700, 950, 5000):
        deep = '{"x":' * depth + "1" + "}" * depth
        for kind in ("merge-patch+json", "apply-patch+yaml"):
            answer = await api("PATCH", f"{bags}/b?fieldManager=f&dryRun=All", deep, kind=f"application/{kind}")
            assert answer.get("code", 200) < 500
    huge = await api("PATCH", f"{bags}/b", '{"x":1' + "0" * 40 + "}", kind="application/merge-patch+json")
    assert huge.get("code", 200) < 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
metas = st.fixed_dictionaries(
    {}, optional={k: json_values for k in ("name", "labels", "annotations", "finalizers", "ownerReferences", "uid")}
)
bodies = st.fixed_dictionaries(
    {"metadata": metas | json_values},
    optional={k: json_values for k in ("spec", "status", "data", "kind", "apiVersion")},
)
PATHS = (
    "/api/v1/namespaces/default/persistentvolumeclaims", "/api/v1/persistentvolumes", "/api/v1/namespaces/default/pods",
    "/apis/storage.k8s.io/v1/storageclasses", "/apis/storage.k8s.io/v1/csinodes", "/apis/storage.k8s.io/v1/csidrivers",
    "/apis/snapshot.storage.k8s.io/v1/namespaces/default/volumesnapshots", "/api/v1/namespaces/default/secrets",
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "/api/v1/namespaces/default/services", "/api/v1/nodes",
    "/apis/apps/v1/namespaces/default/deployments", "/api/v1/namespaces/default/events",
    "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "/apis/authentication.k8s.io/v1/tokenreviews",
    "/api/v1/namespaces/default/serviceaccounts/default/token", "/api/v1/namespaces/default/bindings",
    "/apis/events.k8s.io/v1/namespaces/default/events", "/apis/coordination.k8s.io/v1/namespaces/default/leases",
)  # fmt: skip
ODD_PATHS = st.text("/apis.v1-namespaces%20{}?=&\\<>é", max_size=40)
FUZZ = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


async def status_of(session, method, path, body, kind="application/json"):
    async with session.request(method, path, data=body, headers={"Content-Type": kind}) as response:
        await response.read()
        return response.status


def test_no_body_brings_the_server_to_a_500(tmp_path_factory):
    """One loop for all examples: hypothesis runs them inside it, each through real requests."""

    async def run_all():
        async with serve(tmp_path_factory.mktemp("fuzz") / "data") as server:
            headers = {"Authorization": f"Bearer {server.token}"}
            async with aiohttp.ClientSession(server.insecure_url, headers=headers) as session:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(None, examples, loop, session)

    def examples(loop, session):
        def ask(*arguments):
            return asyncio.run_coroutine_threadsafe(status_of(session, *arguments), loop).result(30)

        @FUZZ
        @given(st.sampled_from(PATHS), bodies | json_values)
        def post(path, body):
            assert ask("POST", path, json.dumps(body)) < 500

        @FUZZ
        @given(st.sampled_from(PATHS), bodies | json_values, st.sampled_from(["json-patch+json", "merge-patch+json",
               "strategic-merge-patch+json", "apply-patch+yaml"]))  # fmt: skip
        def patch(path, body, kind):
            assert ask("PATCH", f"{path}/x?fieldManager=f", json.dumps(body), f"application/{kind}") < 500

        @FUZZ
        @given(bodies | json_values, st.sampled_from(["json-patch+json", "merge-patch+json",
               "strategic-merge-patch+json", "apply-patch+yaml"]))  # fmt: skip
        def patch_existing(body, kind):
            path = "/api/v1/namespaces/default/serviceaccounts/default?fieldManager=f&dryRun=All"
            assert ask("PATCH", path, json.dumps(body), f"application/{kind}") < 500

        @FUZZ
        @given(st.binary(max_size=60))
        def raw(body):
            for kind in ("application/json", "application/yaml"):
                assert ask("POST", MAPS, body, kind) < 500
            assert ask("POST", MAPS, b"k8s\0" + body, "application/vnd.kubernetes.protobuf") < 500

        @FUZZ
        @given(ODD_PATHS, st.sampled_from(["GET", "POST", "DELETE", "OPTIONS"]))
        def paths(path, method):
            assert ask(method, "/" + path.lstrip("/"), None) < 500

        for test in (post, patch, patch_existing, raw, paths):
            test()

    asyncio.run(run_all())
