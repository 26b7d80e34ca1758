"""A weak account sends bodies that are dear to read, patch, compare or show; nobody else may have to wait for that."""

import asyncio
import io
import json
import time
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from tests.support.accounts import APPLY, MERGE, rule, serve_accounts
from tests.support.stall import no_stall

from moorage.apiserver.limits import ServerLimits

pytestmark = pytest.mark.asyncio(loop_scope="module")
NS = "/api/v1/namespaces/default"
MAPS, PODS = f"{NS}/configmaps", f"{NS}/pods"
YAML, JSON_PATCH = "application/yaml", "application/json-patch+json"
STRATEGIC, PROTOBUF = "application/strategic-merge-patch+json", "application/vnd.kubernetes.protobuf"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
THINGS = "/apis/attack.example.org/v1/namespaces/default/things"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory):
    async with serve_accounts(tmp_path_factory.mktemp("api")) as accounts:
        yield accounts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def weak(cluster):
    rules = [rule("*", "configmaps pods events"), rule("*", "things", "attack.example.org")]
    rules.append(rule("*", "customresourcedefinitions", "apiextensions.k8s.io"))
    return await cluster.account("weak", *rules, cluster=True)


@asynccontextmanager
async def bounded(cluster, seconds=6.0):
    """The attack within takes a bounded time, and meanwhile others are answered without waiting for it."""
    began = time.monotonic()
    with no_stall():
        attack_is_over = asyncio.Event()
        others = asyncio.create_task(read_until(cluster.admin, attack_is_over))
        await asyncio.sleep(0)
        try:
            yield
        finally:
            attack_is_over.set()
            longest = await others
    assert time.monotonic() - began < seconds * 5  # a machine that runs other tests too may be slow
    assert longest < 5


async def read_until(caller, is_over):
    longest = 0.0
    while not is_over.is_set():
        began = time.monotonic()
        assert (await caller("GET", f"{NS}/serviceaccounts/default"))[0] in (200, 404)
        longest = max(longest, time.monotonic() - began)
        await asyncio.sleep(0.05)
    return longest


def config(name="c", **data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def stream(body):
    return io.BytesIO(body.encode() if isinstance(body, str) else body)


# -- bodies ----

YAML_HEAD = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  a: "
LAUGHS = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)
)
BODIES = [
    ("YAML of three megabytes", YAML, YAML_HEAD + "[" + "a, " * 1_000_000 + "]", 413),
    ("many values in YAML", YAML, YAML_HEAD + "[" + "a, " * 300_000 + "]", 413),
    ("brackets in YAML", YAML, "[" * 20_000, 400),
    ("brackets that are closed", YAML, "[" * 20_000 + "]" * 20_000, 400),
    ("nested block lists", YAML, "- " * 20_000, 400),
    ("indented mappings", YAML, "".join(" " * n + "a:\n" for n in range(1000)), 400),
    ("numbers in base 60", YAML, YAML_HEAD + ":".join(["59"] * 100_000), 201),
    ("long digits", YAML, YAML_HEAD + "9" * 500_000, 201),
    ("aliases", YAML, LAUGHS, 400),
    ("anchors", YAML, "".join(f"a{n}: &x{n} 1\n" for n in range(20_000)), 422),
    ("many documents", YAML, "--- a\n" * 100_000, 400),
    ("quotes", YAML, '"' + '\\"' * 400_000, 400),
    ("no UTF-8", "application/json", b'{"a":"\xff"}', 400),
    ("empty lists", "application/json", "[" + "[]," * 1_000_000 + "[]]", 413),
    ("depth", "application/json", "[" * 1_500_000, 413),
    ("closed depth", "application/json", '{"a":' * 5000 + "1" + "}" * 5000, 400),
    ("a long number", "application/json", "9" * 3_000_000, 400),
    ("an unended text", "application/json", '{"a":"' + '\\"' * 1_400_000, 400),
    ("escapes", "application/json", '{"metadata":{"name":"c"},"data":{"a":"' + "\\u0041" * 450_000 + '"}}', 201),
    ("protobuf of ones", PROTOBUF, b"k8s\x00" + b"\x08\x01" * 1_400_000, 413),
    ("protobuf", PROTOBUF, b"k8s\x00" + b"\x12\xff\xff\x3f" + b"\x08\x01" * 400_000, 400),
]  # fmt: skip


@pytest.mark.parametrize(("media", "body", "expected"), [b[1:] for b in BODIES], ids=[b[0] for b in BODIES])
async def test_a_body_that_is_dear_to_read(cluster, weak, media, body, expected):
    async with bounded(cluster):
        status, answer = await weak("POST", MAPS, stream(body), media)
        assert status == expected, str(answer)[:400]
        if status == 201:
            assert (await weak("DELETE", f"{MAPS}/c"))[0] == 200


async def test_yaml_is_read_as_kubernetes_reads_it(weak):
    text = "{apiVersion: v1, kind: ConfigMap, metadata: {name: y, labels: {1: 'a'}}, immutable: yes, "
    text += "data: {a: '1:30', b: 2001-01-01, c: 1:30}}"
    status, made = await weak("POST", MAPS, text, YAML)
    assert (status, made["data"], made["immutable"]) == (201, {"a": "1:30", "b": "2001-01-01", "c": "1:30"}, True)
    assert made["metadata"]["labels"] == {"1": "a"}
    for bad in ("a: 1\na: 2", "!!binary aGVsbG8=", "? [a]\n: b", "a: .inf", "a: 1e9999", "!!python/object:os.system x"):
        assert (await weak("POST", MAPS, bad, YAML))[0] == 400, bad


async def test_a_compressed_body_is_refused_unread(weak):
    import gzip

    bomb = gzip.compress(b" " * 50_000_000)
    assert (await weak("POST", MAPS, stream(bomb), Content_Encoding="gzip"))[0] == 415
    assert (await weak("POST", MAPS, stream(b"x" * (4 << 20))))[0] == 413


# -- patches ----


def doubled(path, times):
    return [{"op": "copy", "from": path, "path": f"{path}-{n}"} for n in range(times)]


PATCHES = [
    ("copies of a copy", JSON_PATCH, [{"op": "copy", "from": "/data", "path": f"/data/{n}"} for n in range(60)], 413),
    ("copies of a long text", JSON_PATCH, doubled("/data/long", 5_000), 413),
    ("tests of a long text", JSON_PATCH, [{"op": "test", "path": "/data/long", "value": "x" * 1000}] * 2_500, 422),
    ("moves there and back", JSON_PATCH, [{"op": "move", "from": f"/data/{a}", "path": f"/data/{b}"}
                                      for a, b in (("long", "k"), ("k", "long"))] * 5_000, 200),
    ("a long path", JSON_PATCH, [{"op": "add", "path": "/a" * 500_000, "value": 1}], 422),
    ("a path that grows", JSON_PATCH, [{"op": "add", "path": "/a" * n, "value": {}} for n in range(1, 1500)], 200),
    ("too many steps", JSON_PATCH, [{"op": "test", "path": "", "value": 1}] * 10_001, 413),
    ("a long list of directives", STRATEGIC, {"data": {"$retainKeys": [f"k{n}" for n in range(90_000)]}}, 200),
    ("many fields", MERGE, {"data": {f"k{n}": "" for n in range(49_000)}}, 200),
]  # fmt: skip


@pytest.mark.parametrize(("media", "patch", "expected"), [p[1:] for p in PATCHES], ids=[p[0] for p in PATCHES])
async def test_a_patch_that_is_dear_to_carry_out(cluster, weak, media, patch, expected):
    await cluster.admin("DELETE", f"{MAPS}/c")
    assert (await weak("POST", MAPS, stream(json.dumps(config(long="x" * 100_000)))))[0] == 201
    async with bounded(cluster):
        status, answer = await weak("PATCH", f"{MAPS}/c", stream(json.dumps(patch)), media)
        assert status == expected, str(answer)[:400]


async def test_a_pod_of_many_containers(cluster, weak):
    containers = [{"name": f"c{n}", "image": "x", "env": [{"name": "a", "value": "b"}]} for n in range(1_000)]
    async with bounded(cluster):
        body = json.dumps({"metadata": {"name": "p"}, "spec": {"containers": containers}})
        assert (await weak("POST", PODS, stream(body)))[0] == 201
    names = [{"name": container["name"]} for container in reversed(containers)]
    patch = {"spec": {"containers": [{**name, "image": "y"} for name in names], "$setElementOrder/containers": names}}
    async with bounded(cluster):
        status, answer = await weak("PATCH", f"{PODS}/p", stream(json.dumps(patch)), STRATEGIC)
        assert status in (200, 422), str(answer)[:300]
    tolerations = [{"key": f"k{n}", "operator": "Exists"} for n in range(20_000)]
    async with bounded(cluster):
        body = json.dumps({"spec": {"tolerations": tolerations}})
        assert (await weak("PATCH", f"{PODS}/p", stream(body), STRATEGIC))[0] in (200, 422)
    await weak("DELETE", f"{PODS}/p?gracePeriodSeconds=0")


async def test_applying_many_fields_and_giving_them_up(cluster, weak):
    path = f"{MAPS}/c?fieldManager="
    await cluster.admin("DELETE", f"{MAPS}/c")
    many, few = config(**{f"k{n}": "v" for n in range(12_000)}), config(**{f"k{n}": "w" for n in range(6_000)})
    async with bounded(cluster):
        assert (await weak("PATCH", path + "one", stream(json.dumps(many)), APPLY))[0] == 201
        status, conflict = await weak("PATCH", path + "two", stream(json.dumps(few)), APPLY)
        assert (status, len(conflict["details"]["causes"])) == (409, 6_000)
        assert (await weak("PATCH", path + "two&force=true", stream(json.dumps(few)), APPLY))[0] == 200
        status, left = await weak("PATCH", path + "one", stream(json.dumps(config(a="b"))), APPLY)
        assert (status, len(left["data"])) == (200, 6_001)


# -- custom kinds ----


def definition(properties, **version):
    names = {"plural": "things", "kind": "Thing"}
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": properties}}}
    served = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}, **version}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.attack.example.org"},
        "spec": {"group": "attack.example.org", "scope": "Namespaced", "names": names, "versions": [served]},
    }


async def define(weak, properties, **version):
    await weak("DELETE", f"{CRDS}/things.attack.example.org")
    status, answer = await weak("POST", CRDS, stream(json.dumps(definition(properties, **version))))
    assert status == 201, str(answer)[:500]


def thing(**spec):
    head = {"apiVersion": "attack.example.org/v1", "kind": "Thing", "metadata": {"name": "t"}}
    return stream(json.dumps({**head, "spec": spec}))


async def test_lists_that_are_sets_and_maps(cluster, weak):
    text = {"type": "string"}
    item = {"type": "object", "properties": {"name": text, "value": text}, "required": ["name"]}
    keyed = {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"], "items": item}
    plain = {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "integer"}}
    await define(weak, {"set": plain, "map": keyed})
    items = [{"name": f"n{n}"} for n in range(4_000)]
    async with bounded(cluster):
        assert (await weak("POST", THINGS, thing(set=[*range(10_000), 7], map=[])))[0] == 422
        assert (await weak("POST", THINGS, thing(set=[], map=[*items, items[3]])))[0] == 422
        path = f"{THINGS}/t?fieldManager=me"
        assert (await weak("PATCH", path, thing(set=list(range(4_000)), map=items), APPLY))[0] == 201
        status, left = await weak("PATCH", path, thing(set=[1], map=items[:1]), APPLY)
        assert (status, left["spec"]) == (200, {"set": [1], "map": items[:1]})


async def test_definitions_that_are_huge_deep_or_many(cluster, weak):
    async with bounded(cluster, 10):
        wide = {f"f{n}": {"type": "string", "description": "x"} for n in range(12_000)}
        await define(weak, wide)
        assert (await weak("POST", THINGS, thing(**{f"f{n}": "x" for n in range(12_000)})))[0] == 201
        assert (await weak("GET", "/openapi/v2"))[0] == 200
        assert (await weak("GET", "/openapi/v3/apis/attack.example.org/v1"))[0] == 200
        assert (await weak("DELETE", f"{THINGS}/t"))[0] == 200
    deep = {"type": "object", "properties": {}}
    for _ in range(70):
        deep = {"type": "object", "properties": {"a": deep}}
    async with bounded(cluster):
        await weak("DELETE", f"{CRDS}/things.attack.example.org")
        assert (await weak("POST", CRDS, definition({"deep": deep})))[0] == 422
        columns = [{"name": f"c{n}", "type": "string", "jsonPath": ".spec[*]" + "[*]" * 50} for n in range(200)]
        await define(
            weak,
            {"a": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            additionalPrinterColumns=columns,
        )
        tree: list[Any] = []
        for _ in range(10):
            tree = [tree, tree, tree]
        assert (await weak("POST", THINGS, thing(a=tree)))[0] in (201, 413)
        assert (await weak("GET", THINGS, Accept="application/json;as=Table;v=v1;g=meta.k8s.io"))[0] == 200


# -- reading ----


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowd(cluster):
    """A thousand objects in a namespace."""
    await cluster.admin.make("/api/v1/namespaces", {"metadata": {"name": "crowd"}})
    path = "/api/v1/namespaces/crowd/configmaps"
    labels = {f"l{n}": "v" for n in range(20)}
    bodies = [{"metadata": {"name": f"c{n}", "labels": labels}, "data": {"a": "x" * 300}} for n in range(1_000)]
    for start in range(0, len(bodies), 100):
        await asyncio.gather(*(cluster.admin.make(path, body) for body in bodies[start : start + 100]))
    return path


TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


@pytest.mark.parametrize(
    ("query", "accept"),
    [
        ("", "application/json"),
        ("", TABLE),
        ("?includeObject=Object", TABLE),
        ("", "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"),
        ("", "application/yaml"),
        ("?labelSelector=" + ",".join(f"l{n % 20}!=x{n}" for n in range(1000)), "application/json"),
        ("?labelSelector=l1 in (" + ",".join(f"v{n}" for n in range(2000)) + ",v)", TABLE),
        ("?resourceVersion=1&resourceVersionMatch=Exact", "application/json"),
        ("?limit=1", "application/json"),
        ("?limit=500&continue=" + "A" * 8000, "application/json"),
        ("?fieldSelector=" + ",".join(f"metadata.name!=c{n}" for n in range(700)), TABLE),
    ],
)
async def test_a_long_list_in_every_form(cluster, weak, crowd, query, accept):
    async with bounded(cluster), weak.session.get(crowd + query, headers={"Accept": accept}) as response:
        assert response.status in (200, 400, 406, 410)
        size = 0
        async for chunk in response.content.iter_chunked(64 << 10):
            size += len(chunk)
        assert size == int(response.headers["Content-Length"])


async def test_a_watch_that_shows_and_selects_much(cluster, weak, crowd):
    path = crowd + "?watch=1&timeoutSeconds=1&labelSelector=" + ",".join(f"l{n % 20}!=x{n}" for n in range(500))
    async with bounded(cluster), weak.session.get(path, headers={"Accept": TABLE}) as response:
        lines = 0
        async for chunk in response.content.iter_any():
            lines += chunk.count(b"\n")
        assert lines >= 1_000


async def test_the_server_says_which_request_held_its_loop(tmp_path, caplog):
    async with serve_accounts(tmp_path, limits=ServerLimits(held_s=0.0)) as cluster:
        assert (await cluster.admin("GET", f"{NS}/configmaps"))[0] == 200
        assert "a request held the event loop" in caplog.text
        metrics = (await cluster.admin("GET", "/metrics"))[1]
    assert "moorage_event_loop_held_seconds_count" in metrics
