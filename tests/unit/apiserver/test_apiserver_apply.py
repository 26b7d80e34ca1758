"""Server-side apply: ownership, conflicts, force, and giving fields up."""

MAPS = "/api/v1/namespaces/default/configmaps"


def config(data, name="m"):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


async def test_apply_creates_then_changes_and_a_repeat_is_no_change(api):
    made = await api.apply(f"{MAPS}/m", config({"a": "1"}), expect=201)
    assert made["metadata"]["managedFields"][0]["manager"] == "me"
    changed = await api.apply(f"{MAPS}/m", config({"a": "2"}), expect=200)
    assert changed["data"] == {"a": "2"}
    again = await api.apply(f"{MAPS}/m", config({"a": "2"}), expect=200)
    assert again["metadata"]["resourceVersion"] == changed["metadata"]["resourceVersion"]


async def test_a_field_of_another_manager_is_a_conflict_until_forced(api):
    await api.apply(f"{MAPS}/m", config({"a": "1"}), manager="one", expect=201)
    refusal = await api.apply(f"{MAPS}/m", config({"a": "2"}), manager="two", expect=409)
    assert refusal["reason"] == "Conflict"
    assert refusal["details"]["causes"] == [
        {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".data.a"}
    ]
    taken = await api.apply(f"{MAPS}/m", config({"a": "2"}), manager="two", force=True, expect=200)
    assert taken["data"] == {"a": "2"}
    assert {entry["manager"] for entry in taken["metadata"]["managedFields"]} == {"two"}


async def test_managers_may_share_a_field_that_they_agree_on(api):
    await api.apply(f"{MAPS}/m", config({"a": "1"}), manager="one", expect=201)
    await api.apply(f"{MAPS}/m", config({"a": "1"}), manager="two", expect=200)
    left = await api.apply(f"{MAPS}/m", config({}), manager="one", expect=200)
    assert left["data"] == {"a": "1"}, "two still wants it"
    gone = await api.apply(f"{MAPS}/m", config({}), manager="two", expect=200)
    assert "data" not in gone


async def test_what_was_there_before_the_first_apply_is_not_taken_silently(api):
    await api.make(MAPS, config({"a": "1"}))
    await api.merge(f"{MAPS}/m", {"metadata": {"managedFields": [{}]}})
    refusal = await api.apply(f"{MAPS}/m", config({"a": "2"}), expect=409)
    assert "before-first-apply" in refusal["message"]


async def test_other_writes_take_ownership_of_what_they_change(api):
    await api.apply(f"{MAPS}/m", config({"a": "1", "b": "1"}), expect=201)
    query = f"{MAPS}/m?fieldManager=patcher"
    await api.merge(query, {"data": {"a": "2"}})
    refusal = await api.apply(f"{MAPS}/m", config({"a": "1", "b": "1"}), expect=409)
    assert 'conflict with "patcher" using v1' in refusal["message"]


async def test_items_of_keyed_lists_have_owners_of_their_own(api):
    path = "/apis/apps/v1/namespaces/default/deployments/d"

    def deployment(*containers):
        labels = {"app": "d"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": list(containers)}}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
                "spec": {"selector": {"matchLabels": labels}, "template": template}}  # fmt: skip

    await api.apply(path, deployment({"name": "a", "image": "1"}), manager="one", expect=201)
    both = await api.apply(path, deployment({"name": "b", "image": "2"}), manager="two", expect=200)
    assert [c["name"] for c in both["spec"]["template"]["spec"]["containers"]] == ["a", "b"]
    minus = deployment({"name": "c", "image": "3"})
    rest = await api.apply(path, minus, manager="two", expect=200)
    assert [c["name"] for c in rest["spec"]["template"]["spec"]["containers"]] == ["a", "c"]


async def test_apply_needs_a_manager_and_a_whole_configuration(api):
    kind = "application/apply-patch+yaml"
    assert "fieldManager" in (await api("PATCH", f"{MAPS}/m", config({}), expect=422, kind=kind))["message"]
    await api.apply(f"{MAPS}/m", {"metadata": {"name": "m"}}, expect=400)
    await api.apply(f"{MAPS}/m", config({}, name="other"), expect=400)
    await api("PATCH", f"{MAPS}/m?force=true", {}, expect=422, kind="application/merge-patch+json")
