"""A weak account tries to do more than its Roles grant: other verbs, other subresources, more rights for itself."""

import pytest
from tests.support.accounts import APPLY, MERGE, RBAC, rule, serve_accounts
from tests.support.stall import no_stall

from moorage.apiserver.access.attributes import Attributes, path_attributes, resource_attributes
from moorage.apiserver.access.rbac import AccessRule
from moorage.apiserver.kinds.registry import KindRegistry, builtin_kinds
from moorage.apiserver.request.routes import route

NS = "/api/v1/namespaces/default"
ROLES, BINDINGS = f"{RBAC}/namespaces/default/roles", f"{RBAC}/namespaces/default/rolebindings"
GROUP = "rbac.authorization.k8s.io"


@pytest.fixture
async def cluster(tmp_path):
    async with serve_accounts(tmp_path / "api") as accounts:
        yield accounts


def pod(name="p", **spec):
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "x"}], **spec}}


# -- the verb of a request ----


@pytest.mark.parametrize(
    ("method", "path", "verb", "namespace", "name"),
    [
        ("GET", "/api/v1/namespaces/a/pods", "list", "a", ""),
        ("GET", "/api/v1/namespaces/a/pods?watch=true", "watch", "a", ""),
        ("GET", "/api/v1/namespaces/a/pods?watch=0", "list", "a", ""),
        ("GET", "/api/v1/namespaces/a/pods/p", "get", "a", "p"),
        ("GET", "/api/v1/namespaces/a/pods/p?watch=true", "get", "a", "p"),
        ("HEAD", "/api/v1/namespaces/a/pods/p", "get", "a", "p"),
        ("HEAD", "/api/v1/namespaces/a/pods", "list", "a", ""),
        ("POST", "/api/v1/namespaces/a/pods", "create", "a", ""),
        ("PUT", "/api/v1/namespaces/a/pods/p", "update", "a", "p"),
        ("PATCH", "/api/v1/namespaces/a/pods/p", "patch", "a", "p"),
        ("DELETE", "/api/v1/namespaces/a/pods/p", "delete", "a", "p"),
        ("DELETE", "/api/v1/namespaces/a/pods", "deletecollection", "a", ""),
        ("GET", "/api/v1/watch/namespaces/a/pods", "watch", "a", ""),
        ("GET", "/api/v1/watch/namespaces/a/pods/p", "watch", "a", "p"),
        ("GET", "/api/v1/pods?fieldSelector=metadata.name%3Dp", "list", "", "p"),
        ("GET", "/api/v1/pods?watch=1&fieldSelector=metadata.name%3D%3Dp,spec.nodeName%3Dn", "watch", "", "p"),
        ("GET", "/api/v1/pods?fieldSelector=metadata.name!%3Dp", "list", "", ""),
        ("DELETE", "/api/v1/namespaces/a/pods?fieldSelector=metadata.name%3Dp", "deletecollection", "a", ""),
        ("GET", "/api/v1/namespaces/a", "get", "a", "a"),
        ("PUT", "/api/v1/namespaces/a/finalize", "update", "a", "a"),
        ("GET", "/api/v1/nodes/n", "get", "", "n"),
        ("BREW", "/api/v1/namespaces/a/pods", "", "a", ""),
    ],
)
def test_a_request_counts_as_the_verb_that_kubernetes_gives_it(method, path, verb, namespace, name):
    from yarl import URL

    url = URL(path, encoded=True)
    found = route(url.raw_path, KindRegistry(builtin_kinds()))
    assert found is not None
    asked = resource_attributes(method, found, url.query)
    assert (asked.verb, asked.namespace, asked.name) == (verb, namespace, name)


def test_a_cluster_scoped_kind_has_no_path_in_a_namespace():
    assert route("/api/v1/namespaces/a/nodes/n", KindRegistry(builtin_kinds())) is None
    assert route(f"{RBAC}/namespaces/a/clusterroles/c", KindRegistry(builtin_kinds())) is None


ALLOWED = [
    (rule("get", "pods"), Attributes("get", "", "pods", "", "a", "p"), True),
    (rule("get", "pods"), Attributes("get", "", "pods", "log", "a", "p"), False),
    (rule("get", "pods/log"), Attributes("get", "", "pods", "log", "a", "p"), True),
    (rule("get", "*/log"), Attributes("get", "", "pods", "log", "a", "p"), True),
    (rule("get", "*/log"), Attributes("get", "", "pods", "", "a", "p"), False),
    (rule("get", "pods/*"), Attributes("get", "", "pods", "log", "a", "p"), False),
    (rule("get", "*"), Attributes("get", "", "pods", "exec", "a", "p"), True),
    (rule("get", "*"), Attributes("get", "apps", "deployments", "", "a", "p"), False),
    (rule("get", "pods", "*"), Attributes("get", "apps", "pods"), True),
    (rule("get", "pods", names="p"), Attributes("get", "", "pods", "", "a", "p"), True),
    (rule("get", "pods", names="p"), Attributes("get", "", "pods", "", "a", "q"), False),
    (rule("list watch", "pods", names="p"), Attributes("list", "", "pods"), False),
    (rule("list watch", "pods", names="p"), Attributes("list", "", "pods", name="p"), True),
    (rule("create", "pods", names="p"), Attributes("create", "", "pods"), False),
    (rule("deletecollection", "pods", names="p"), Attributes("deletecollection", "", "pods"), False),
    (rule("*", "pods"), Attributes("anything", "", "pods"), True),
    (rule("get", "pods"), path_attributes("GET", "/metrics"), False),
    ({"verbs": ["get"], "nonResourceURLs": ["/healthz/*"]}, path_attributes("GET", "/healthz/etcd"), True),
    ({"verbs": ["get"], "nonResourceURLs": ["/healthz/*"]}, path_attributes("GET", "/healthz"), False),
    ({"verbs": ["get"], "nonResourceURLs": ["/metrics"]}, path_attributes("POST", "/metrics"), False),
    ({"verbs": ["*"], "nonResourceURLs": ["*"]}, Attributes("get", "", "pods"), False),
]


@pytest.mark.parametrize(("granted", "asked", "is_allowed"), ALLOWED)
def test_a_rule_grants_what_it_grants_in_kubernetes(granted, asked, is_allowed):
    assert AccessRule.of(granted).allows(asked) is is_allowed


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_a_watch_path_is_no_way_to_write(cluster, method):
    watcher = await cluster.account("watcher", rule("watch", "*"))
    await cluster.admin.make(f"{NS}/configmaps", {"metadata": {"name": "mine"}})
    for path in (f"{NS}/configmaps", f"{NS}/configmaps/mine"):
        watched = path.replace("/api/v1/", "/api/v1/watch/")
        status, _ = await watcher(method, watched, {"metadata": {"name": "new"}})
        assert status == 405
    assert (await cluster.admin("GET", f"{NS}/configmaps/new"))[0] == 404
    assert (await cluster.admin("GET", f"{NS}/configmaps/mine"))[0] == 200


async def test_what_is_granted_by_name_is_not_granted_by_list(cluster):
    reader = await cluster.account("reader", rule("get list watch", "secrets", names="mine"))
    for name in ("mine", "other"):
        await cluster.admin.make(f"{NS}/secrets", {"metadata": {"name": name}})
    assert (await reader("GET", f"{NS}/secrets"))[0] == 403
    assert (await reader("GET", f"{NS}/secrets?fieldSelector=metadata.name!%3Dx"))[0] == 403
    assert (await reader("GET", f"{NS}/secrets?fieldSelector=metadata.name%3Dother"))[0] == 403
    status, found = await reader("GET", f"{NS}/secrets?fieldSelector=metadata.name%3Dmine")
    assert (status, [one["metadata"]["name"] for one in found["items"]]) == (200, ["mine"])
    both = "fieldSelector=metadata.name%3Dmine&fieldSelector=metadata.name%3Dother"
    status, found = await reader("GET", f"{NS}/secrets?{both}")
    assert (status, [one["metadata"]["name"] for one in found["items"]]) == (200, ["mine"])
    assert (await reader("GET", "/api/v1/secrets?fieldSelector=metadata.name%3Dmine"))[0] == 403, "another namespace"


async def test_paths_that_are_no_resources_have_their_own_rules(cluster):
    weak = await cluster.account("weak")
    assert (await weak("GET", "/api/v1"))[0] == 200
    assert (await weak("GET", "/openapi/v3"))[0] == 200
    assert (await weak("GET", "/metrics"))[0] == 403
    scraper = await cluster.account("scraper", {"verbs": ["get"], "nonResourceURLs": ["/metrics"]}, cluster=True)
    status, text = await scraper("GET", "/metrics")
    assert status == 200
    assert "moorage_event_loop_held_seconds_bucket" in text


# -- creating through update and patch ----


async def test_update_and_apply_create_only_for_those_who_may_create(cluster):
    editor = await cluster.account("editor", rule("update patch get", "configmaps limitranges"))
    applied = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "new"}, "data": {"a": "b"}}
    status, answer = await editor("PATCH", f"{NS}/configmaps/new?fieldManager=me", applied, APPLY)
    assert status == 403
    assert "cannot create" in answer["message"]
    assert (await editor("PUT", f"{NS}/limitranges/new", {"metadata": {"name": "new"}, "spec": {"limits": []}}))[
        0
    ] == 403
    for path in ("configmaps/new", "limitranges/new"):
        assert (await cluster.admin("GET", f"{NS}/{path}"))[0] == 404
    await cluster.admin.make(f"{NS}/configmaps", {"metadata": {"name": "new"}})
    assert (await editor("PATCH", f"{NS}/configmaps/new?fieldManager=me", applied, APPLY))[0] == 200
    maker = await cluster.account("maker", rule("create patch update", "configmaps"))
    other = {**applied, "metadata": {"name": "other"}}
    assert (await maker("PATCH", f"{NS}/configmaps/other?fieldManager=me", other, APPLY))[0] == 201


# -- granting ----

WRITES_RBAC = rule("create update patch get", "roles rolebindings", GROUP)


def role(*rules, name="evil"):
    return {"apiVersion": f"{GROUP}/v1", "kind": "Role", "metadata": {"name": name}, "rules": list(rules)}


def binding(kind, name, account, as_name="evil"):
    return {
        "metadata": {"name": as_name},
        "roleRef": {"apiGroup": GROUP, "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "default"}],
    }


@pytest.mark.parametrize(
    ("wanted", "is_allowed"),
    [
        (rule("get", "configmaps"), True),
        (rule("get list", "configmaps secrets"), True),
        (rule("get", "configmaps", names="one"), True),
        (rule("delete", "configmaps"), False),
        (rule("*", "configmaps"), False),
        (rule("get", "*"), False),
        (rule("get", "pods"), False),
        (rule("get", "configmaps", "*"), False),
        (rule("patch", "pods/log", names="one"), True),
        (rule("patch", "nodes/log", names="one"), True),
        (rule("patch", "pods/log"), False),
        (rule("patch", "*/log", names="one"), True),
        (rule("escalate", "roles", GROUP), False),
    ],
)
async def test_a_role_grants_only_what_its_writer_holds(cluster, wanted, is_allowed):
    held = [rule("get list", "configmaps"), rule("get list", "secrets"), rule("patch", "*/log", names="one two")]
    writer = await cluster.account("writer", WRITES_RBAC, *held)
    status, answer = await writer("POST", ROLES, role(wanted))
    assert status == (201 if is_allowed else 403), answer
    await cluster.admin.make(ROLES, role(name="empty"))
    for method, media, body in (
        ("PATCH", MERGE, {"rules": [wanted]}),
        ("PUT", "application/json", role(wanted, name="empty")),
        ("PATCH", APPLY, role(wanted, name="empty")),
        ("PATCH", "application/json-patch+json", [{"op": "add", "path": "/rules", "value": [wanted]}]),
    ):
        query = "?fieldManager=me&force=true" if media == APPLY else ""
        status, answer = await writer(method, f"{ROLES}/empty{query}", body, media)
        assert status == (200 if is_allowed else 403), answer
        if not is_allowed:
            assert "not currently held" in answer["message"]


async def test_an_account_does_not_bind_itself_to_more(cluster):
    writer = await cluster.account("writer", WRITES_RBAC, rule("get", "configmaps"))
    for name in ("cluster-admin", "view", "admin"):
        assert (await writer("POST", BINDINGS, binding("ClusterRole", name, "writer")))[0] == 403
    await cluster.admin.make(ROLES, role(rule("get", "configmaps"), name="small"))
    await cluster.admin.make(ROLES, role(rule("get", "secrets"), name="large"))
    assert (await writer("POST", BINDINGS, binding("Role", "large", "writer")))[0] == 403
    assert (await writer("POST", BINDINGS, binding("Role", "none", "writer")))[0] == 404
    assert (await writer("POST", BINDINGS, binding("Role", "small", "writer", "good")))[0] == 201
    await cluster.admin.make(BINDINGS, binding("Role", "large", "someone", "theirs"))
    mine = {"subjects": [{"kind": "ServiceAccount", "name": "writer", "namespace": "default"}]}
    assert (await writer("PATCH", f"{BINDINGS}/theirs", mine, MERGE))[0] == 403
    assert (await writer("PATCH", f"{BINDINGS}/theirs", {"metadata": {"labels": {"a": "b"}}}, MERGE))[0] == 200
    assert (await writer("GET", f"{NS}/secrets"))[0] == 403


async def test_bind_and_escalate_lift_the_limit_for_what_they_name(cluster):
    binder = await cluster.account("binder", WRITES_RBAC, rule("bind", "clusterroles", GROUP, names="view"))
    assert (await binder("POST", BINDINGS, binding("ClusterRole", "view", "binder", "a")))[0] == 201
    assert (await binder("POST", BINDINGS, binding("ClusterRole", "edit", "binder", "b")))[0] == 403
    escalator = await cluster.account("escalator", WRITES_RBAC, rule("escalate", "roles", GROUP))
    assert (await escalator("POST", ROLES, role(rule("*", "*", "*"))))[0] == 201


async def test_a_cluster_role_that_collects_rules_needs_every_right(cluster):
    writes = rule("create update patch get", "clusterroles clusterrolebindings", GROUP)
    writer = await cluster.account("writer", writes, rule("get", "configmaps"), cluster=True)
    selector = {"clusterRoleSelectors": [{"matchLabels": {"kubernetes.io/bootstrapping": "rbac-defaults"}}]}
    evil = {"metadata": {"name": "evil"}, "aggregationRule": selector}
    assert (await writer("POST", f"{RBAC}/clusterroles", evil))[0] == 403
    assert (await writer("PATCH", f"{RBAC}/clusterroles/writer", {"aggregationRule": selector}, MERGE))[0] == 403
    url = {"metadata": {"name": "evil"}, "rules": [{"verbs": ["get"], "nonResourceURLs": ["/metrics"]}]}
    assert (await writer("POST", f"{RBAC}/clusterroles", url))[0] == 403
    small = {"metadata": {"name": "small"}, "rules": [rule("get", "configmaps")]}
    assert (await writer("POST", f"{RBAC}/clusterroles", small))[0] == 201


async def test_the_default_roles_collect_the_rules_of_others(cluster):
    viewer = await cluster.account("viewer")
    await cluster.admin.make(BINDINGS, binding("ClusterRole", "view", "viewer", "v"))
    assert (await viewer("GET", f"{NS}/configmaps"))[0] == 200
    for path in (f"{NS}/secrets", "/api/v1/nodes", "/api/v1/namespaces/kube-system/configmaps"):
        assert (await viewer("GET", path))[0] == 403
    assert (await viewer("POST", f"{NS}/configmaps", {"metadata": {"name": "a"}}))[0] == 403
    leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
    assert (await viewer("GET", leases))[0] == 403
    labels = {"rbac.authorization.k8s.io/aggregate-to-view": "true"}
    more = {"metadata": {"name": "more", "labels": labels}, "rules": [rule("list", "leases", "coordination.k8s.io")]}
    await cluster.admin.make(f"{RBAC}/clusterroles", more)
    assert (await viewer("GET", leases))[0] == 200
    assert (await cluster.admin("DELETE", f"{RBAC}/clusterroles/more"))[0] == 200
    assert (await viewer("GET", leases))[0] == 403
    assert (await cluster.admin("DELETE", f"{BINDINGS}/v"))[0] == 200
    assert (await viewer("GET", f"{NS}/configmaps"))[0] == 403


async def test_a_role_with_very_many_rules_does_not_hold_the_server(cluster):
    writer = await cluster.account("writer", WRITES_RBAC, *(rule("get", f"kind{n}") for n in range(200)))
    words = [f"w{n}" for n in range(600)]
    wide = {"verbs": words, "apiGroups": words, "resources": words, "resourceNames": words}
    with no_stall():
        assert (await writer("POST", ROLES, role(wide)))[0] == 403
        assert (await writer("POST", ROLES, role(*(rule("get", f"x{n}") for n in range(2500)))))[0] == 403


# -- subresources ----


async def test_each_subresource_needs_its_own_rule(cluster):
    plain = await cluster.account("plain", rule("*", "pods deployments", "*"))
    await cluster.admin.make(f"{NS}/pods", pod())
    for method, part in (
        ("PATCH", "status"), ("PATCH", "resize"), ("PATCH", "ephemeralcontainers"), ("POST", "binding"),
        ("POST", "eviction"), ("GET", "log"), ("GET", "exec"), ("POST", "exec"), ("GET", "attach"),
    ):  # fmt: skip
        assert (await plain(method, f"{NS}/pods/p/{part}", {}, MERGE))[0] == 403, part
    assert (await plain("POST", f"{NS}/bindings", {}))[0] == 403
    assert (await plain("POST", f"{NS}/serviceaccounts/default/token", {}))[0] == 403
    assert (await plain("PATCH", "/apis/apps/v1/namespaces/default/deployments/d/scale", {}, MERGE))[0] == 403


async def test_to_run_a_command_get_is_not_enough(cluster):
    await cluster.admin.make(f"{NS}/pods", pod())
    reader = await cluster.account("reader", rule("get", "pods/exec pods/attach pods/portforward"))
    runner = await cluster.account("runner", rule("get create", "pods/exec"))
    for part in ("exec", "attach", "portforward"):
        status, answer = await reader("GET", f"{NS}/pods/p/{part}?command=id")
        assert status == 403
        assert "cannot create" in answer["message"]
    assert (await runner("GET", f"{NS}/pods/p/exec?command=id"))[0] == 400, "allowed, but the pod has no node"


async def test_resize_changes_resources_and_nothing_else(cluster):
    sizer = await cluster.account("sizer", rule("patch update get", "pods/resize"))
    small = {"requests": {"cpu": "100m"}}
    await cluster.admin.make(f"{NS}/pods", pod(containers=[{"name": "main", "image": "good", "resources": small}]))
    evil = {"name": "../../../evil", "image": "evil", "securityContext": {"privileged": True}}
    changed = {"name": "main", "image": "evil", "command": ["evil"], "resources": {"requests": {"cpu": "200m"}}}
    spec = {"containers": [changed, evil], "hostPID": True, "serviceAccountName": "default", "nodeName": "n"}
    body = {"metadata": {"name": "p", "labels": {"evil": "yes"}, "finalizers": ["evil/e"]}, "spec": spec}
    for method, media in (("PATCH", MERGE), ("PUT", "application/json")):
        status, answer = await sizer(method, f"{NS}/pods/p/resize", body, media)
        assert status == 200, answer
        (only,) = answer["spec"]["containers"]
        assert (only["image"], only["resources"]) == ("good", {"requests": {"cpu": "200m"}})
        assert "command" not in only
        assert not {"labels", "finalizers"} & set(answer["metadata"])
        assert not answer["spec"].get("hostPID")
    for resources in (
        {"requests": {"cpu": "200m", "ephemeral-storage": "1Gi"}},
        {"requests": {"cpu": "-1"}},
        {},
        {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}},
    ):
        one = {"spec": {"containers": [{"name": "main", "image": "good", "resources": resources}]}}
        assert (await sizer("PATCH", f"{NS}/pods/p/resize", one, MERGE))[0] == 422, resources


async def test_ephemeral_containers_are_only_added_and_are_checked(cluster):
    debugger = await cluster.account(
        "debugger", rule("patch update get", "pods/ephemeralcontainers"), rule("patch", "pods")
    )
    await cluster.admin.make(f"{NS}/pods", pod())
    path = f"{NS}/pods/p/ephemeralcontainers"

    async def add(*containers, **spec):
        wanted = {"spec": {"ephemeralContainers": list(containers), **spec}}
        return await debugger("PATCH", path, wanted, MERGE)

    good = {"name": "debug", "image": "x", "targetContainerName": "main"}
    for bad in (
        {**good, "name": "../../../evil"}, {**good, "name": "main"}, {**good, "name": ""}, {**good, "image": ""},
        {**good, "targetContainerName": "none"}, {**good, "ports": [{"containerPort": 1}]},
        {**good, "resources": {"limits": {"cpu": "1"}}},
        {**good, "volumeMounts": [{"name": "host", "mountPath": "/host"}]},
    ):  # fmt: skip
        assert (await add(bad))[0] == 422, bad
    host = [{"name": "host", "hostPath": {"path": "/"}}]
    status, answer = await add(good, volumes=host, containers=[{"name": "main", "image": "evil"}])
    assert status == 200, answer
    assert answer["spec"]["containers"][0]["image"] == "x"
    assert [volume["name"] for volume in answer["spec"]["volumes"]] != ["host"]
    assert (await add({**good, "image": "evil"}))[0] == 422
    assert (await add())[0] == 422
    assert (await add(good, {**good, "name": "second"}))[0] == 200
    beside = {"spec": {"ephemeralContainers": [{**good, "name": "third"}]}}
    assert (await debugger("PATCH", f"{NS}/pods/p", beside, MERGE))[0] == 422, "not without the subresource"
    made = pod("q", ephemeralContainers=[good])
    assert (await cluster.admin("POST", f"{NS}/pods", made))[0] == 422, "nor when a pod is created"


async def test_a_dry_run_changes_nothing(cluster):
    await cluster.admin.make(f"{NS}/pods", pod())
    evict = {"metadata": {"name": "p"}}
    assert (await cluster.admin("POST", f"{NS}/pods/p/eviction?dryRun=All", evict))[0] == 201
    assert (await cluster.admin("GET", f"{NS}/pods/p"))[0] == 200
    await cluster.admin.make("/api/v1/namespaces", {"metadata": {"name": "n"}})
    kept = {"metadata": {"name": "n"}, "spec": {"finalizers": []}}
    assert (await cluster.admin("PUT", "/api/v1/namespaces/n/finalize?dryRun=All", kept))[0] == 200
    _, found = await cluster.admin("GET", "/api/v1/namespaces/n")
    assert found["spec"]["finalizers"] == ["kubernetes"]
    other = {"metadata": {"name": "other"}}
    assert (await cluster.admin("POST", f"{NS}/pods/p/eviction", other))[0] == 400


async def test_status_writes_leave_the_spec_alone(cluster):
    reporter = await cluster.account("reporter", rule("patch update", "pods/status"))
    await cluster.admin.make(f"{NS}/pods", pod())
    wanted = {
        "status": {"phase": "Running"},
        "spec": {"containers": [{"name": "main", "image": "evil"}], "nodeName": "n"},
    }
    status, answer = await reporter("PATCH", f"{NS}/pods/p/status", wanted, MERGE)
    assert (status, answer["status"]["phase"]) == (200, "Running")
    assert answer["spec"]["containers"][0]["image"] == "x"
    assert "nodeName" not in answer["spec"]


# -- acting as others ----


async def test_only_those_who_may_impersonate_do(cluster):
    weak = await cluster.account("weak")
    maps = f"{NS}/configmaps"
    assert (await weak("GET", maps, Impersonate_User="admin", Impersonate_Group="system:masters"))[0] == 403
    assert (await weak("GET", maps, Impersonate_Group="system:masters"))[0] == 400
    assert (await weak("GET", maps, Impersonate_Uid="1"))[0] == 400
    status, _ = await cluster.admin("GET", maps, Impersonate_User="system:serviceaccount:default:weak")
    assert status == 403, "the administrator is held to what the account may do"
    assert (await cluster.admin("GET", maps, Impersonate_User="alice"))[0] == 403
    assert (await cluster.admin("GET", maps, Impersonate_User="alice", Impersonate_Group="system:masters"))[0] == 200
    helper = await cluster.account("helper", rule("impersonate", "users", names="alice"), cluster=True)
    assert (await helper("GET", "/api/v1", Impersonate_User="alice"))[0] == 200
    for headers in (
        {"Impersonate_User": "bob"},
        {"Impersonate_User": "alice", "Impersonate_Group": "system:masters"},
        {"Impersonate_User": "alice", "Impersonate_Uid": "1"},
        {"Impersonate_User": "alice", "Impersonate_Extra_Scopes": "all"},
        {"Impersonate_User": "system:serviceaccount:kube-system:default"},
    ):
        assert (await helper("GET", "/api/v1", **headers))[0] == 403, headers


async def test_kubectl_auth_whoami_shows_the_impersonated_user(cluster):
    path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
    status, answer = await cluster.admin(
        "POST",
        path,
        {"spec": {}},
        Impersonate_User="system:serviceaccount:a:b",
        **{"Impersonate-Extra-Some%2fKey": "v"},
    )
    assert status == 201
    assert answer["status"]["userInfo"] == {
        "username": "system:serviceaccount:a:b",
        "groups": ["system:serviceaccounts", "system:serviceaccounts:a", "system:authenticated"],
        "extra": {"some/key": ["v"]},
    }


async def test_an_account_with_very_many_rules_holds_up_no_request(cluster):
    writer = await cluster.account("writer", WRITES_RBAC, rule("get", "configmaps"))
    names = [rule("get", "configmaps", names=f"c{n}") for n in range(4_000)]
    assert (await writer("POST", ROLES, role(*names, name="many")))[0] == 201
    for n in range(8):
        await cluster.admin.make(BINDINGS, binding("Role", "many", "writer", f"b{n}"))
    with no_stall():
        assert (await writer("GET", f"{NS}/secrets"))[0] == 403
        assert (await writer("GET", f"{NS}/configmaps/none"))[0] == 404
        status, answer = await writer("POST", ROLES, role(*names, name="again"))
    assert status == 403
    assert "too many to compare" in answer["message"]
