"""The page as a person sees it, in Chromium: what is stuck, what moves, what is refused, and what hostile text does."""

import re
from typing import Any

import pytest
from axe_core_python.async_playwright import Axe
from playwright.async_api import expect
from tests.e2e.ui.conftest import browser_page, page_server
from tests.e2e.ui.stuck import BESIDE, STUCK, claim, pod, volume

from moorage.insight.explain import explain
from moorage.kube.objects import PersistentVolumeClaim, VolumeSnapshot
from moorage.testing import until

PATHS = ("/", "/claims", "/nodes", "/snapshots", "/drivers", "/activity", "/o/pvc/default/class-missing")
_PLURALS = {
    "PersistentVolumeClaim": "/api/v1/namespaces/default/persistentvolumeclaims",
    "PersistentVolume": "/api/v1/persistentvolumes",
    "Pod": "/api/v1/namespaces/default/pods",
    "Node": "/api/v1/nodes",
    "StorageClass": "/apis/storage.k8s.io/v1/storageclasses",
    "CSIDriver": "/apis/storage.k8s.io/v1/csidrivers",
    "VolumeAttachment": "/apis/storage.k8s.io/v1/volumeattachments",
    "VolumeSnapshot": "/apis/snapshot.storage.k8s.io/v1/namespaces/default/volumesnapshots",
    "VolumeSnapshotClass": "/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses",
}


async def create(client, manifest):
    """Create an object, and then write its status as a controller would."""
    path = _PLURALS[manifest["kind"]]
    await client.request("POST", path, {key: value for key, value in manifest.items() if key != "status"})
    if "status" in manifest:
        await set_status(client, manifest, manifest["status"])


async def set_status(client, manifest, status):
    path = f"{_PLURALS[manifest['kind']]}/{manifest['metadata']['name']}/status"
    await client.request("PATCH", path, {"status": status}, content_type="application/merge-patch+json")


async def remove(client, manifest):
    path = f"{_PLURALS[manifest['kind']]}/{manifest['metadata']['name']}"
    unfinalized = {"metadata": {"finalizers": None}}
    await client.request("PATCH", path, unfinalized, content_type="application/merge-patch+json")
    await client.request("DELETE", path, {"gracePeriodSeconds": 0})


async def test_every_kind_of_stuck_object_appears_with_its_explanation_and_leaves_when_it_is_gone(desk):
    await expect(desk.page.get_by_text("Nothing is stuck.")).to_be_visible()
    for manifest in BESIDE:
        await create(desk.client, manifest)
    for manifest in STUCK.values():
        await create(desk.client, manifest)
    troubles = desk.page.locator(".troubles li")
    await expect(troubles).to_have_count(len(STUCK))
    for reference in STUCK:
        story = await explain(desk.client, reference, "default")
        row = troubles.filter(has=desk.page.get_by_role("link", name=reference, exact=True))
        await expect(row.locator(".sentence")).to_have_text(story.sentence)
        if story.next_step:
            await expect(row.locator("code")).to_have_text(story.next_step)
    for manifest in STUCK.values():
        await remove(desk.client, manifest)
    await expect(desk.page.get_by_text("Nothing is stuck.")).to_be_visible()


async def test_a_claim_walks_through_the_columns_without_a_reload(desk):
    await desk.page.evaluate("window.sameDocument = true")

    def lane(name):
        return desk.page.locator(f".lane-{name} .card")

    for manifest in BESIDE:
        await create(desk.client, manifest)
    data = claim("data", storageClassName="", volumeName="pv-data")
    await create(desk.client, data)
    await expect(lane("provision")).to_have_text(re.compile("data"))
    await create(desk.client, volume("pv-data", "Bound", claimRef={"name": "data", "namespace": "default"}))
    web = pod("web", "data", nodeName="good")
    await create(desk.client, web)
    await set_status(desk.client, data, {"phase": "Bound", "capacity": {"storage": "1Gi"}})
    await expect(lane("attach")).to_have_text(re.compile("data"))
    await expect(lane("provision")).to_have_count(0)
    attached = {
        **STUCK["va/fails"],
        "metadata": {"name": "va"},
        "spec": {"attacher": "d.example", "nodeName": "good", "source": {"persistentVolumeName": "pv-data"}},
        "status": {"attached": True},
    }
    await create(desk.client, attached)
    await expect(lane("mount")).to_have_text(re.compile("data"))
    await set_status(desk.client, web, {"phase": "Running"})
    await expect(desk.page.locator(".recent .card")).to_have_text(re.compile("data.*provision.*attach.*mount", re.S))
    assert await desk.page.evaluate("window.sameDocument") is True


async def test_hostile_names_and_messages_stay_text(desk):
    text = '<script>window.owned=1</script><img src=x onerror="window.owned=1">"\'‮ evil'
    long = "x" + "y" * 251 + "z"
    await create(desk.client, claim("hostile", storageClassName="", volumeName="pv-hostile"))
    await create(
        desk.client, {**claim(long, storageClassName="nowhere"), "metadata": {"name": long, "namespace": "default"}}
    )
    event: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "hostile.1", "namespace": "default"},
        "involvedObject": {"kind": "PersistentVolumeClaim", "name": "hostile", "namespace": "default"},
        "reason": "ProvisioningFailed",
        "message": text,
        "type": "Warning",
    }
    found = await desk.client.get(PersistentVolumeClaim, "hostile", "default")
    event["involvedObject"]["uid"] = found.uid
    await desk.client.request("POST", "/api/v1/namespaces/default/events", event)
    await desk.go("/o/pvc/default/hostile")
    await expect(desk.page.locator(".part-events")).to_contain_text("<script>window.owned=1</script>")
    assert "‮" not in await desk.page.content()
    await desk.go("/")
    await expect(desk.page.locator(".troubles li").first).to_be_visible()
    for width in (400, 1280):
        await desk.page.set_viewport_size({"width": width, "height": 800})
        assert await desk.page.evaluate("document.documentElement.scrollWidth") <= width
    await desk.go(f"/?q={'<script>'}")
    assert await desk.page.evaluate("window.owned") is None


async def test_search_and_namespace_narrow_what_is_shown_and_can_be_shared_as_a_link(desk):
    for name in ("apples", "pears"):
        await create(desk.client, claim(name, storageClassName="nowhere"))
    await desk.go("/claims")
    rows = desk.page.locator("tbody tr")
    await expect(rows).to_have_count(2)
    await desk.page.keyboard.press("/")
    await desk.page.keyboard.type("pear")
    await desk.page.keyboard.press("Enter")
    await expect(rows).to_have_count(1)
    assert "q=pear" in desk.page.url
    await create(desk.client, claim("pear-tree", storageClassName="nowhere"))
    await expect(rows).to_have_count(2)
    await desk.go("/claims?namespace=elsewhere")
    await expect(desk.page.get_by_text("No claim matches.")).to_be_visible()


async def test_actions_show_their_command_refuse_what_is_dangerous_and_do_what_they_say(desk):
    await create(desk.client, claim("data", storageClassName="", volumeName="pv-data"))
    await create(desk.client, volume("pv-data", "Bound", claimRef={"name": "data", "namespace": "default"}))
    await set_status(desk.client, claim("data"), {"phase": "Bound", "capacity": {"storage": "1Gi"}})
    await create(desk.client, pod("web", "data", nodeName="good"))
    await desk.go("/o/pvc/default/data")
    await desk.page.get_by_role("link", name="Delete").click()
    await expect(desk.page.get_by_text("Refused: it is used by web")).to_be_visible()
    await expect(desk.page.locator("pre")).to_have_text("kubectl -n default delete pvc data")
    await expect(desk.page.get_by_role("button", name="Delete the claim")).to_have_count(0)
    await desk.go("/o/pvc/default/data")
    await desk.page.get_by_role("link", name="Snapshot", exact=True).click()
    await desk.page.get_by_label("Name").fill("by-hand")
    await desk.page.get_by_role("button", name="Take a snapshot").click()
    await expect(desk.page).to_have_url(re.compile("/o/snapshot/default/by-hand$"))
    made = await desk.client.get(VolumeSnapshot, "by-hand", "default")
    assert made.spec.source.persistent_volume_claim_name == "data"
    await desk.go("/o/pvc/default/data")
    await desk.page.get_by_role("link", name="Grow").click()
    await desk.page.get_by_label("New size").fill("512Mi")
    await desk.page.get_by_role("button", name="Show the command").click()
    await expect(desk.page.get_by_text("a volume can only grow")).to_be_visible()
    assert not desk.complaints


async def test_the_page_comes_back_by_itself_after_its_server_was_restarted(client, tmp_path):
    async with browser_page() as (page, _):
        async with page_server(client, tmp_path) as link:
            await page.goto(link)
            port = int(link.partition("/?")[0].rpartition(":")[2])
            await expect(page.get_by_text("Nothing is stuck.")).to_be_visible()
        await expect(page.locator("#connection")).to_be_visible()
        await create(client, claim("late", storageClassName="nowhere"))
        async with page_server(client, tmp_path, port=port):
            await expect(page.locator(".troubles li")).to_have_text(re.compile("pvc/late"))
            await expect(page.locator("#connection")).to_be_hidden()


async def test_what_the_account_may_not_read_is_said_and_not_shown_as_empty(client, tmp_path, monkeypatch):
    request = client.request

    async def without_snapshots(method, path, *more, **rest):
        if "volumesnapshots" in path:
            return await request(method, "/apis/snapshot.storage.k8s.io/v1/forbidden", *more, **rest)
        return await request(method, path, *more, **rest)

    monkeypatch.setattr(client, "request", without_snapshots)
    async with page_server(client, tmp_path) as link, browser_page() as (page, _):
        await page.goto(link)
        await expect(page.get_by_text("Not shown: VolumeSnapshot")).to_be_visible()
        await page.goto(link.partition("/?")[0] + "/snapshots")
        await expect(page.get_by_text("Snapshots cannot be shown")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_page_has_a_serious_accessibility_fault(client, tmp_path, scheme):
    for manifest in BESIDE:
        await create(client, manifest)
    await create(client, STUCK["pvc/class-missing"])
    async with page_server(client, tmp_path) as link, browser_page(color_scheme=scheme, bypass_csp=True) as (page, _):
        await page.goto(link)
        for path in PATHS:
            await page.goto(link.partition("/?")[0] + path)
            found = await Axe().run(page)
            faults = [f"{path}: {each['id']}: {each['nodes'][0]['html']}" for each in found["violations"]]
            assert not faults


async def test_without_the_key_or_with_a_foreign_form_nothing_is_done(client, tmp_path):
    import aiohttp

    await create(client, claim("data", storageClassName=""))
    async with (
        page_server(client, tmp_path, allow_actions=True) as link,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        base = link.partition("/?")[0]
        for path in ("/", "/live?path=/", "/claims", "/do/delete/pvc/default/data"):
            async with session.get(base + path) as answer:
                assert answer.status == 401
        async with session.get(base + "/?token=wrong") as answer:
            assert answer.status == 401
        async with session.get(base + "/claims", headers={"Host": "evil.example"}) as answer:
            assert answer.status == 421
        async with session.get(link) as answer:
            assert answer.status == 200
            assert "token" not in str(answer.url)
            assert "unsafe-inline" not in answer.headers["Content-Security-Policy"]
        delete = base + "/do/delete/pvc/default/data"
        for form, headers in (
            ({"sure": "yes", "key": "guessed"}, {"Origin": base}),
            ({"sure": "yes"}, {}),
            ({"sure": "yes"}, {"Origin": "http://evil.example"}),
        ):
            async with session.post(delete, data=form, headers=headers) as answer:
                assert answer.status == 403
        for odd in (
            "/o/pvc/default/..%2f..%2fsecrets",
            "/o/secret/default/x",
            "/static/..%2fserver.py",
            "/%00",
            "/?start=-1",
        ):
            async with session.get(base + odd) as answer:
                assert answer.status in (200, 400, 404), odd
                assert "Traceback" not in await answer.text()
        await until(lambda: client.find(PersistentVolumeClaim, "data", "default"), what="the claim is still there")
