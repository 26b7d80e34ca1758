"""Patches on plain values: the examples of the RFCs, the directives of strategic merge, and their algebra."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.apiserver.errors import StatusError
from moorage.apiserver.kinds.schema import struct
from moorage.apiserver.writing.json_patch import json_patch, merge_patch, same
from moorage.apiserver.writing.managed_fields import fields_v1, leaves, paths_from
from moorage.apiserver.writing.strategic_patch import strategic_patch

scalars = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text("abc/~", max_size=3))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/~", max_size=2), inner, max_size=3)
)
objects = st.dictionaries(st.text("abc", min_size=1, max_size=2), values, max_size=4)


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ],
)
def test_merge_patches_follow_rfc_7386(target, patch, result):
    assert merge_patch(target, patch) == result


@given(objects, objects)
def test_a_merge_patch_applied_twice_is_applied_once(target, patch):
    once = merge_patch(target, patch)
    assert merge_patch(once, patch) == once


@pytest.mark.parametrize(
    ("target", "steps", "result"),
    [
        ({"a": 1}, [{"op": "add", "path": "/b", "value": 2}], {"a": 1, "b": 2}),
        ({"a": [1, 3]}, [{"op": "add", "path": "/a/1", "value": 2}], {"a": [1, 2, 3]}),
        ({"a": [1]}, [{"op": "add", "path": "/a/-", "value": 2}], {"a": [1, 2]}),
        ({"a": 1, "b": 2}, [{"op": "remove", "path": "/a"}], {"b": 2}),
        ({"a": {"b": 1}}, [{"op": "move", "from": "/a/b", "path": "/c"}], {"a": {}, "c": 1}),
        ({"a~/b": 1}, [{"op": "replace", "path": "/a~0~1b", "value": 2}], {"a~/b": 2}),
        (
            {"a": 1},
            [{"op": "test", "path": "/a", "value": 1}, {"op": "copy", "from": "/a", "path": "/b"}],
            {"a": 1, "b": 1},
        ),
    ],
)
def test_json_patches_follow_rfc_6902(target, steps, result):
    assert json_patch(target, steps) == result


@pytest.mark.parametrize(
    ("steps", "http"),
    [
        ([{"op": "test", "path": "/a", "value": True}], 422),
        ([{"op": "remove", "path": "/x"}], 422),
        ([{"op": "replace", "path": "/b/7", "value": 1}], 422),
        ([{"op": "add", "path": "/b/01", "value": 1}], 422),
        ([{"op": "move", "from": "/b", "path": "/b/0"}], 422),
        ([{"op": "frobnicate", "path": "/a"}], 422),
        ([{"op": "add", "path": "/a"}], 400),
        ({"op": "add"}, 400),
        ([{"op": "test", "path": "/a", "value": 1}] * 10_001, 413),
    ],
)
def test_a_json_patch_that_cannot_be_applied_is_refused(steps, http):
    with pytest.raises(StatusError) as refusal:
        json_patch({"a": 1, "b": [1]}, steps)
    assert refusal.value.http == http


@given(objects, values)
def test_a_json_patch_never_changes_its_input(target, value):
    before = merge_patch({}, {}) | target
    result = json_patch(target, [{"op": "add", "path": "/new", "value": value}])
    assert target == before
    assert same(result["new"], value)


POD = struct("core.v1.Pod")


def pod(*containers, **spec):
    return {"spec": {"containers": list(containers), **spec}}


def test_strategic_patches_merge_lists_by_their_keys():
    have = pod({"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}]}, {"name": "b", "image": "2"})
    patch = pod({"name": "b", "image": "3"}, {"name": "a", "env": [{"name": "Y", "value": "2"}]}, {"name": "c"})
    found = strategic_patch(have, patch, POD)["spec"]["containers"]
    assert [c["name"] for c in found] == ["b", "a", "c"]
    assert found[1]["env"] == [{"name": "Y", "value": "2"}, {"name": "X", "value": "1"}]
    assert found[0]["image"] == "3"


def test_strategic_directives_delete_replace_and_order():
    have = pod({"name": "a"}, {"name": "b"}, {"name": "c"})
    gone = strategic_patch(have, pod({"name": "b", "$patch": "delete"}), POD)
    assert [c["name"] for c in gone["spec"]["containers"]] == ["a", "c"]
    order = {"spec": {"$setElementOrder/containers": [{"name": "c"}, {"name": "a"}, {"name": "b"}]}}
    ordered = strategic_patch(have, order, POD)
    assert [c["name"] for c in ordered["spec"]["containers"]] == ["c", "a", "b"]
    replaced = strategic_patch(have, pod({"name": "z"}, {"$patch": "replace"}), POD)
    assert [c["name"] for c in replaced["spec"]["containers"]] == ["z"]
    volumes = {"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}
    retained = {"spec": {"volumes": [{"name": "v", "$retainKeys": ["name", "secret"], "secret": {"secretName": "s"}}]}}
    assert strategic_patch(volumes, retained, POD)["spec"]["volumes"] == [{"name": "v", "secret": {"secretName": "s"}}]


@pytest.mark.parametrize(
    ("have", "patched", "order", "result"),
    [
        ("AB", "C", None, "CAB"),  # what is new and listed goes ahead
        ("ABC", "CA", None, "BCA"),
        ("ABCD", "DB", None, "ACDB"),
        ("ABC", "E", "EB", "EABC"),
        ("ABCD", "C", "CA", "BCAD"),
        ("ABC", "", "CB", "ACB"),
        ("ABC", "Z", "B", "ABCZ"),  # the patch is not in its own order; nothing is lost
    ],
)
def test_items_of_merged_lists_find_their_places(have, patched, order, result):
    body = {"status": {"conditions": [{"type": t} for t in patched]}} if patched else {"status": {}}
    if order is not None:
        body["status"]["$setElementOrder/conditions"] = [{"type": t} for t in order]
    old = {"status": {"conditions": [{"type": t} for t in have]}}
    assert "".join(c["type"] for c in strategic_patch(old, body, POD)["status"]["conditions"]) == result


def test_finalizers_are_a_set_and_can_lose_members():
    have = {"metadata": {"finalizers": ["a", "b"]}}
    assert strategic_patch(have, {"metadata": {"finalizers": ["c", "a"]}}, POD)["metadata"]["finalizers"] == [
        "c",
        "a",
        "b",
    ]
    lost = strategic_patch(have, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"]}}, POD)
    assert lost["metadata"]["finalizers"] == ["b"]


def test_atomic_lists_are_replaced():
    claims = struct("core.v1.PersistentVolumeClaim")
    have = {"spec": {"accessModes": ["ReadWriteOnce"]}}
    patch = {"spec": {"accessModes": ["ReadWriteMany"]}}
    assert strategic_patch(have, patch, claims)["spec"]["accessModes"] == ["ReadWriteMany"]


@given(st.sets(st.lists(st.sampled_from(["f:a", "f:b", 'k:{"n":1}']), min_size=1, max_size=3).map(tuple)))
def test_field_sets_survive_their_written_form(paths):
    assert paths_from(fields_v1(paths)) == paths


def test_the_fields_of_a_pod_are_named_by_its_keys():
    found = leaves({"spec": {"containers": [{"name": "a", "image": "x"}]}}, POD)
    assert ("f:spec", "f:containers", 'k:{"name":"a"}', "f:image") in found
