"""Objects of tenants, connections and drivers against those who read them: controllers, sidecars, live page, check."""

import asyncio
import sys
import time

import pytest
from aiohttp import ClientSession, web
from msgspec import convert

from moorage.conformance import files
from moorage.connections import FewConnections
from moorage.insight.causes.claims_source import source_too_large
from moorage.insight.cluster_view import ClusterView
from moorage.kube.api.wire import Codec, shallow
from moorage.kube.cache.interning import shared
from moorage.kube.control import probes
from moorage.kube.objects import PersistentVolumeClaim
from moorage.ui.pictures import family_of
from moorage.upkeep.gc.observe import _claims_by_volume
from moorage.upkeep.gc.plan import DriverObjects, Inventory, SeenVolume, plan


def nested(levels):
    return b'{"f:a":' * levels + b"{}" + b"}" * levels


def test_an_object_nested_as_deep_as_kubernetes_takes_it_blinds_no_controller():
    """Any account may write managedFields; Kubernetes takes 10,000 levels."""
    good = b'{"metadata":{"name":"good","namespace":"n"}}'
    deep = b'{"metadata":{"managedFields":[{"fieldsV1":%s}],"name":"deep","namespace":"n"}}' % nested(9_900)
    codec = Codec()
    page = codec.page(PersistentVolumeClaim, b'{"metadata":{"continue":"more"},"items":[%s,%s]}' % (good, deep))
    assert [claim.name for claim in page.items] == ["good", "deep"]
    assert page.token == "more"
    for kind in ("ADDED", "DELETED"):
        event = codec.event(PersistentVolumeClaim, b'{"type":"%s","object":%s}' % (kind.encode(), deep))
        assert (event.type, event.object.name) == (kind, "deep")
    nulls = b'{"metadata":{"name":"nulls","labels":null},"deep":%s}' % nested(600)
    assert codec.object(PersistentVolumeClaim, nulls).name == "nulls"


def test_only_what_is_nested_deeply_is_left_out():
    text = b'{"a": ["}]{[", "\\"{", {"b": 1}], "c": %s, "d": [2]}'
    assert shallow(text % nested(3)) == text % nested(3)
    assert shallow(text % nested(500)) == text % (b'{"f:a":' * 98 + b"null" + b"}" * 98)


async def test_idle_clients_keep_no_probe_from_controllers_and_sidecars():
    """Any pod reaches that address. A probe of the kubelet that fails would restart the process."""

    async def well():
        return 200, "ok"

    async with probes.serve("127.0.0.1", 0, {"/healthz": well}) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(150)]
        try:
            async with asyncio.timeout(10):
                while sum(not reader.at_eof() for reader, _ in idle) > 64:
                    await asyncio.sleep(0.01)
            async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/healthz") as answer:
                assert answer.status == 200
        finally:
            for _, writer in idle:
                writer.close()


async def test_idle_strangers_push_out_each_other_and_not_who_has_signed_in():
    async def signs_in(request):
        few.trust(request)
        return web.Response()

    app = web.Application()
    app.router.add_get("/", signs_in)
    runner = web.AppRunner(app)
    await runner.setup()
    few = FewConnections(runner.server, 8)
    idle = []
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            idle += [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
            async with asyncio.timeout(10):
                while sum(not stranger.at_eof() for stranger, _ in idle) > 7:
                    await asyncio.sleep(0.01)
        writer.close()
    finally:
        for _, stranger in idle:
            stranger.close()
        await runner.cleanup()


def test_a_family_of_very_many_claims_is_drawn_in_part():
    view, count = ClusterView(), 6_000
    for number in range(count):
        source = {"dataSource": {"kind": "PersistentVolumeClaim", "name": f"c{(number - 1) // 50}"}} if number else {}
        document = {"metadata": {"name": f"c{number}", "namespace": "n"}, "spec": source}
        view.claims[f"n/c{number}"] = convert(document, PersistentVolumeClaim)
    began = time.process_time()
    tree = family_of(view, view.claims["n/c0"])
    assert time.process_time() - began < 2
    assert tree is not None
    levels = [tree]
    for branch in levels:
        levels += branch.children
    assert len(levels) == 300


def test_long_annotations_of_tenants_are_not_kept_for_ever():
    """Some versions of Python never free an interned text."""
    text = "x" * 10_000
    claim = convert({"metadata": {"name": "c", "annotations": {"note": text}}}, PersistentVolumeClaim)
    shared(claim)
    assert sys.intern("".join(["x"] * 10_000)) is not claim.annotations["note"]


def test_an_amount_beyond_all_bounds_ends_no_explanation():
    """Kubernetes takes 1e300 as the size of a claim."""
    source = {"kind": "PersistentVolumeClaim", "name": "origin"}
    document = {
        "metadata": {"name": "huge", "namespace": "n"},
        "spec": {"resources": {"requests": {"storage": "1e300"}}, "dataSource": source},
        "status": {"phase": "Pending"},
    }
    view = ClusterView()
    origin = {
        "metadata": {"name": "origin", "namespace": "n"},
        "spec": {},
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
    }
    view.claims = {claim.key: claim for claim in (convert(each, PersistentVolumeClaim) for each in (document, origin))}
    assert source_too_large(view, view.claims["n/huge"]) is not None


def test_a_claim_that_names_the_volume_of_another_is_given_no_command_for_it():
    """Anyone may write any volumeName into a claim; the command would hand over the data."""

    def claim(uid, namespace):
        metadata = {"name": "data", "namespace": namespace, "uid": uid}
        return convert({"metadata": metadata, "spec": {"volumeName": "pvc-1"}}, PersistentVolumeClaim)

    owner, thief = claim("1", "shop"), claim("2", "evil")
    for claims, told in (((owner, thief), "--claim shop/data"), ((thief,), "whose data")):
        cluster = DriverObjects("d", True, claims=_claims_by_volume(claims))
        world = Inventory(1e6, ("/pool",), volumes=[SeenVolume("pvc-1-abc", "pvc-1", "/pool", 0)], cluster=cluster)
        (finding,) = plan(world, 0)
        assert told in finding.held
        assert "--claim evil" not in finding.held


@pytest.mark.parametrize("link", ["file", "directory"])
def test_a_driver_leads_the_writes_of_a_check_to_no_other_file(tmp_path, link):
    victim, published = tmp_path / "victim", tmp_path / "published"
    victim.mkdir()
    (victim / files.DATA_NAME).write_bytes(b"precious")
    if link == "directory":
        published.symlink_to(victim)
    else:
        published.mkdir()
        (published / files.DATA_NAME).symlink_to(victim / files.DATA_NAME)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        files.write(str(published), False, b"overwritten")
    if link == "file":
        with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
            files.write(str(published / files.DATA_NAME), True, b"overwritten")
    assert (victim / files.DATA_NAME).read_bytes() == b"precious"
