"""Validation rules of custom kinds, against a whole server."""

import pytest

from moorage.apiserver.crd import rule_process

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SHIPS = "/apis/example.com/v1/ships"


def definition(spec):
    schema = {"type": "object", "properties": {"spec": spec}}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": "ships", "kind": "Ship"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "ships.example.com"},
        "spec": {"group": "example.com", "scope": "Cluster", "names": names, "versions": [version]},
    }


def ruled(rule, schema=None, **more):
    base = schema or {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return definition({**base, "x-kubernetes-validations": [{"rule": rule, **more}]})


def ship(name="a", **spec):
    return {"apiVersion": "example.com/v1", "kind": "Ship", "metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        ("self.isGreenish()", {}),
        ("self.a ==", {}),
        ("", {}),
        ("true", {"messageExpression": "1"}),
        ("true", {"reason": "Whatever"}),
        ("true", {"fieldPath": ".nowhere"}),
        ("true", {"message": "two\nlines"}),
    ],
)
async def test_a_definition_with_a_bad_rule_is_refused(api, rule, more):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer = await api("POST", CRDS, ruled(rule, schema, **more), expect=422)
    assert "x-kubernetes-validations[0]" in answer["details"]["causes"][0]["field"]


async def test_old_self_is_refused_where_items_have_no_identity(api):
    items = {"type": "string", "x-kubernetes-validations": [{"rule": "self == oldSelf"}]}
    schema = {"type": "object", "properties": {"l": {"type": "array", "items": items}}}
    await api("POST", CRDS, definition(schema), expect=422)


async def test_a_bad_rule_is_refused_in_an_update_too(api):
    await api.make(CRDS, ruled("true"))
    changed = await api("GET", f"{CRDS}/ships.example.com")
    changed["spec"]["versions"][0]["schema"] = ruled("nothing()")["spec"]["versions"][0]["schema"]
    await api("PUT", f"{CRDS}/ships.example.com", changed, expect=422)


async def test_rules_decide_about_creates_updates_and_patches(api):
    await api.make(CRDS, ruled("self.low <= self.high && self.high / 2 >= 1", message="low above high"))
    answer = await api("POST", SHIPS, ship(low=3, high=2), expect=422)
    assert answer["details"]["causes"] == [
        {"reason": "FieldValueInvalid", "message": "Invalid value: {}: low above high", "field": "spec"}
    ]
    await api("POST", SHIPS, ship(low=1), expect=422)  # a rule without a verdict is broken
    await api.make(SHIPS, ship(low=1, high=2))
    await api.merge(f"{SHIPS}/a", {"spec": {"low": 5}}, expect=422)
    await api.merge(f"{SHIPS}/a", {"spec": {"high": 7}})
    await api.apply(f"{SHIPS}/a", ship(low=8), force=True, expect=422)


async def test_messages_reasons_and_paths_come_from_the_rule(api):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "m": {"type": "integer"}}}
    more = {"messageExpression": "'n is ' + string(self.n)", "reason": "FieldValueForbidden", "fieldPath": ".n"}
    await api.make(CRDS, ruled("self.n < 3", schema, **more))
    answer = await api("POST", SHIPS, ship(n=3), expect=422)
    assert answer["details"]["causes"] == [
        {"reason": "FieldValueForbidden", "message": "Forbidden: n is 3", "field": "spec.n"}
    ]


async def test_transition_rules_follow_items_by_their_key(api):
    item = {
        "type": "object",
        "required": ["k"],
        "properties": {
            "k": {"type": "string"},
            "v": {"type": "integer", "x-kubernetes-validations": [{"rule": "self >= oldSelf"}]},
        },
    }
    items = {"type": "array", "items": item, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"]}
    await api.make(CRDS, definition({"type": "object", "properties": {"l": items}}))
    await api.make(SHIPS, ship(l=[{"k": "a", "v": 3}, {"k": "b", "v": 1}]))
    await api.merge(f"{SHIPS}/a", {"spec": {"l": [{"k": "b", "v": 1}, {"k": "a", "v": 4}]}})
    await api.merge(f"{SHIPS}/a", {"spec": {"l": [{"k": "a", "v": 3}]}}, expect=422)


async def test_rules_of_the_root_see_the_name(api):
    made = ruled("true")
    root = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    root["x-kubernetes-validations"] = [{"rule": "self.metadata.name.startsWith('ms-')"}]
    await api.make(CRDS, made)
    await api("POST", SHIPS, ship("ss-a"), expect=422)
    await api.make(SHIPS, ship("ms-a"))


async def test_the_snapshot_kinds_keep_their_rules(api):
    path = "/apis/snapshot.storage.k8s.io/v1/namespaces/default/volumesnapshots"
    source = {"persistentVolumeClaimName": "a", "volumeSnapshotContentName": "b"}
    made = {"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": {"name": "s"}}
    await api("POST", path, {**made, "spec": {"source": source}}, expect=422)
    await api.make(path, {**made, "spec": {"source": {"persistentVolumeClaimName": "a"}}})
    await api.merge(f"{path}/s", {"spec": {"source": {"persistentVolumeClaimName": "b"}}}, expect=422)


async def test_without_the_libraries_rules_are_refused_by_name(api, monkeypatch):
    monkeypatch.setattr(rule_process, "is_installed", lambda: False)
    answer = await api("POST", CRDS, ruled("true"), expect=422)
    assert "moorage[apiserver]" in answer["message"]


async def test_many_writes_at_once_share_the_process(api):
    import asyncio

    await api.make(CRDS, ruled("self.n >= 0"))
    await asyncio.gather(*(api.make(SHIPS, ship(f"s{n}", n=n)) for n in range(50)))
    await asyncio.gather(*(api("POST", SHIPS, ship(f"t{n}", n=-1), expect=422) for n in range(50)))


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "a{2000}", "x" * 20_000])
@pytest.mark.parametrize("place", ["plain", "anyOf"])
async def test_a_definition_with_a_bad_pattern_is_refused(api, pattern, place):
    text = {"type": "string", "pattern": pattern}
    field = text if place == "plain" else {"type": "string", "anyOf": [{"pattern": pattern}]}
    answer = await api("POST", CRDS, definition({"type": "object", "properties": {"t": field}}), expect=422)
    assert answer["details"]["causes"][0]["field"].endswith(".pattern")


async def test_patterns_are_searched_for_anywhere_in_the_text(api):
    properties = {"t": {"type": "string", "pattern": "b+"}, "u": {"type": "string", "pattern": r"^\p{Lu}$"}}
    await api.make(CRDS, definition({"type": "object", "properties": properties}))
    await api.make(SHIPS, ship("a", t="abc", u="É"))
    answer = await api("POST", SHIPS, ship("b", t="ac", u="é"), expect=422)
    assert [cause["field"] for cause in answer["details"]["causes"]] == ["spec.t", "spec.u"]


async def test_without_the_libraries_patterns_are_refused_by_name(api, monkeypatch):
    monkeypatch.setattr(rule_process, "is_installed", lambda: False)
    properties = {"t": {"type": "string", "pattern": "a"}}
    answer = await api("POST", CRDS, definition({"type": "object", "properties": properties}), expect=422)
    assert "moorage[apiserver]" in answer["message"]
