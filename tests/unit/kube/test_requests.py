"""One request and what may go wrong with it: what is repeated, what is not, and what the caller is told."""

import asyncio

import pytest

from moorage.kube.api.client import TRIES_FOR_A_PERSON, PatchType
from moorage.kube.errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    TooManyRequests,
    Unavailable,
)
from moorage.kube.objects.core import ConfigMap, Node

MAPS = "/api/v1/namespaces/ns/configmaps"


def test_an_object_lives_from_create_to_delete(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            made = await client.create(ConfigMap, {"metadata": {"name": "a", "namespace": "ns"}, "data": {"k": "v"}})
            assert (made.key, made.data) == ("ns/a", {"k": "v"})
            with pytest.raises(AlreadyExists):
                await client.create(ConfigMap, {"metadata": {"name": "a"}}, "ns")
            changed = await client.patch(ConfigMap, "a", {"data": {"k": None, "l": "w"}}, "ns")
            assert changed.data == {"l": "w"}
            assert changed.version > made.version
            with pytest.raises(Conflict):
                await client.patch(ConfigMap, "a", {"data": {}}, "ns", version=made.metadata.resource_version)
            await client.delete(ConfigMap, "a", "ns")
            assert await client.find(ConfigMap, "a", "ns") is None
            with pytest.raises(NotFound):
                await client.get(ConfigMap, "a", "ns")

    virtual(story)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("plain-1.example.com", "plain-1.example.com"),
        ("system:node:n1", "system:node:n1"),
        ("me@example.com", "me@example.com"),
        ("..a", "..a"),
        ("a?b", "a%3Fb"),
        ("a#b", "a%23b"),
        ("a b", "a%20b"),
        ("a\\b", "a%5Cb"),
        ("ä", "%C3%A4"),
    ],
)
def test_a_name_is_one_part_of_a_path(name, part):
    maps = ConfigMap.resource
    assert maps.path("ns", name) == f"{MAPS}/{part}"
    assert maps.path(name, "a", "status") == f"/api/v1/namespaces/{part}/configmaps/a/status"
    assert maps.path(name) == f"/api/v1/namespaces/{part}/configmaps"
    assert Node.resource.path(None, name) == f"/api/v1/nodes/{part}"


@pytest.mark.parametrize("name", [".", "..", "../x", "../../other/secrets/s", "a/b", "/", "%2e%2e", "a%2fb", "a%"])
def test_what_is_no_name_leads_nowhere(virtual, fake, name):
    for where in [("ns", name), (name, "a"), (name,)]:
        with pytest.raises(BadRequest, match="is no name"):
            ConfigMap.resource.path(*where)

    async def story():
        async with fake() as api, api.client() as client:
            with pytest.raises(BadRequest):
                await client.find(ConfigMap, name, "ns")
            assert api.seen == []

    virtual(story)


def test_without_a_name_no_object_is_asked_for_let_alone_deleted(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            for ask in (client.get, client.find, client.delete):
                with pytest.raises(BadRequest, match="ConfigMap without a name"):
                    await ask(ConfigMap, "", "ns")
            for change in (client.patch, client.update):
                with pytest.raises(BadRequest, match="ConfigMap without a name"):
                    await change(ConfigMap, "", {}, "ns")
            assert api.seen == []

    virtual(story)


@pytest.mark.parametrize(
    ("kind", "key", "parts"),
    [
        (ConfigMap, "ns/a", ("ns", "a")),
        (ConfigMap, "ns/../other/a", ("ns", "../other/a")),
        (ConfigMap, "a", ("", "a")),
        (Node, "n1", ("", "n1")),
        (Node, "x/n1", ("", "x/n1")),
    ],
)
def test_a_key_is_a_namespace_and_a_name(kind, key, parts):
    assert kind.resource.split(key) == parts


def test_a_write_is_repeated_when_the_server_says_to_come_back(virtual, fake, fault):
    async def story():
        async with fake() as api, api.client() as client:
            loop = asyncio.get_running_loop()
            api.faults.append(fault(429, {"Retry-After": "7"}))
            api.faults.append(fault(503, {"Retry-After": "3"}))
            began = loop.time()
            await client.create(ConfigMap, {"metadata": {"name": "a"}}, "ns")
            assert loop.time() - began >= 10
            assert len(api.requests("POST")) == 3

    virtual(story)


def test_an_absurd_retry_after_does_not_hang_the_caller(virtual, fake, fault):
    async def story():
        async with fake() as api, api.client() as client:
            api.faults.append(fault(429, {"Retry-After": "999999"}))
            api.faults.append(fault(429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}))
            began = asyncio.get_running_loop().time()
            await client.list(ConfigMap, "ns")
            assert asyncio.get_running_loop().time() - began < 40

    virtual(story)


@pytest.mark.parametrize(("options", "tries"), [({}, 5), ({"tries": TRIES_FOR_A_PERSON}, 3)])
def test_the_server_that_always_says_429_is_given_up_on(virtual, fake, fault, options, tries):
    async def story():
        async with fake() as api, api.client(**options) as client:
            api.faults.extend(fault(429, {"Retry-After": "1"}) for _ in range(20))
            with pytest.raises(TooManyRequests):
                await client.create(ConfigMap, {"metadata": {"name": "a"}}, "ns")
            assert len(api.requests("POST")) == tries

    virtual(story)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_read_survives_5xx_and_a_write_is_sent_once(virtual, fake, fault, status):
    async def story():
        async with fake() as api, api.client() as client:
            api.put(f"{MAPS}/a")
            api.faults.append(fault(status, method="GET"))
            assert (await client.get(ConfigMap, "a", "ns")).name == "a"
            api.faults.append(fault(status, method="PATCH"))
            with pytest.raises(Unavailable) as caught:
                await client.patch(ConfigMap, "a", {"data": {"x": "y"}}, "ns")
            assert caught.value.status == status
            assert len(api.requests("PATCH")) == 1

    virtual(story)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_write_whose_answer_is_lost_is_not_sent_twice(virtual, fake, fault, method):
    async def story():
        async with fake() as api, api.client() as client:
            api.put(f"{MAPS}/a")
            api.faults.append(fault(drop=True, apply_first=True, method=method))
            with pytest.raises(Unavailable):
                await client.request(method, f"{MAPS}/a", {"metadata": {"name": "b"}})
            assert len(api.requests(method)) == 1

    virtual(story)


def test_a_read_whose_connection_drops_is_repeated(virtual, fake, fault):
    async def story():
        async with fake() as api, api.client() as client:
            api.put(f"{MAPS}/a")
            api.faults.extend(fault(drop=True) for _ in range(3))
            assert (await client.get(ConfigMap, "a", "ns")).name == "a"

    virtual(story)


def test_a_connection_that_the_server_closed_while_idle_is_not_written_to(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            for number in range(20):
                await client.create(ConfigMap, {"metadata": {"name": f"a{number}"}}, "ns")
                api.cut_idle()
                await asyncio.sleep(0)  # the sockets are closed now, and the client's loop has not been told
            assert len(api.requests("POST")) == 20

    virtual(story)


def test_a_server_is_not_asked_for_warnings_that_nobody_reads(virtual, fake):
    async def story():
        async with fake() as api, api.client(identity="tester") as client:
            await client.create(ConfigMap, {"metadata": {"name": "a"}}, "ns")
            await client.patch(ConfigMap, "a", {"data": {"k": "v"}}, "ns")
            await client.update(ConfigMap, "a", {"metadata": {"name": "a"}}, "ns")
            told = [(verb, query) for verb, _, query in api.seen]
            asked = {"fieldManager": "tester", "fieldValidation": "Ignore"}
            assert told == [("POST", asked), ("PATCH", asked), ("PUT", asked)]

    virtual(story)


def test_a_server_that_is_not_there_yet_is_waited_for(virtual, fake):
    async def story():
        api = fake()
        async with api:
            client = api.client()
        made = asyncio.create_task(client.create(ConfigMap, {"metadata": {"name": "a"}}, "ns"))
        await asyncio.sleep(0.3)
        await api.start()
        assert (await made).name == "a"
        await client.close()
        await api.stop()

    virtual(story)


def test_a_server_that_never_comes_is_an_error_that_names_it(virtual, fake):
    async def story():
        async with fake() as api:
            client = api.client()
        with pytest.raises(Unavailable, match=f"127.0.0.1:{api.port}"):
            await client.get(ConfigMap, "a", "ns")
        await client.close()

    virtual(story)


def test_answers_become_the_errors_that_callers_tell_apart(virtual, fake, fault):
    async def story():
        expected = {
            400: BadRequest,
            403: Forbidden,
            404: NotFound,
            409: Conflict,
            410: Gone,
            413: BadRequest,
            422: Invalid,
        }
        async with fake() as api, api.client() as client:
            for status, kind in expected.items():
                api.faults.append(fault(status))
                with pytest.raises(kind) as caught:
                    await client.request("GET", "/x")
                assert caught.value.status == status

    virtual(story)


@pytest.mark.parametrize("body", [b"", b"<html>bad gateway</html>", b"[1]", b'"text"', b"\xff\xfe", b"null"])
def test_an_error_without_a_status_object_keeps_its_text(virtual, fake, fault, body):
    async def story():
        async with fake() as api, api.client() as client:
            api.faults.append(fault(403, body=body))
            with pytest.raises(Forbidden):
                await client.request("POST", "/x", {})

    virtual(story)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"metadata": 5}', b'{"metadata": {"labels": ["x"]}}', b"\xff"]
)
def test_an_answer_that_is_no_object_is_an_api_error(virtual, fake, fault, body):
    async def story():
        async with fake() as api, api.client() as client:
            api.faults.append(fault(200, body=body))
            with pytest.raises(Unavailable, match="cannot read"):
                await client.get(ConfigMap, "a", "ns")

    virtual(story)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"items": 5}', b'{"metadata": []}', b"\xff"])
def test_an_answer_that_is_no_list_is_an_api_error(virtual, fake, fault, body):
    async def story():
        async with fake() as api, api.client() as client:
            api.faults.append(fault(200, body=body))
            with pytest.raises(Unavailable, match="cannot read"):
                await client.list(ConfigMap, "ns")

    virtual(story)


def test_a_list_goes_through_its_pages(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            for number in range(10):
                api.put(f"{MAPS}/a{number}")
            api.page_limit = 3
            found = await client.list(ConfigMap, "ns", page=3)
            assert [one.name for one in found.items] == [f"a{number}" for number in range(10)]
            assert found.resource_version == str(api.version)
            assert len(api.requests("GET")) == 4

    virtual(story)


def test_a_list_whose_snapshot_is_lost_half_way_is_read_whole(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            for number in range(10):
                api.put(f"{MAPS}/a{number}")
            api.page_limit, api.lose_pages = 3, True
            found = await client.list(ConfigMap, "ns", page=3)
            assert sorted(one.name for one in found.items) == [f"a{number}" for number in range(10)]
            assert "limit" not in api.seen[-1][2]

    virtual(story)


def test_an_unreadable_object_is_left_out_of_a_list(virtual, fake):
    async def story():
        async with fake() as api, api.client() as client:
            api.put(f"{MAPS}/good")
            api.put(f"{MAPS}/odd", data=["not", "a", "map"])
            assert [one.name for one in (await client.list(ConfigMap, "ns")).items] == ["good"]

    virtual(story)


def test_a_versioned_json_patch_asks_for_a_conflict_not_a_failed_test(virtual, fake, fault):
    async def story():
        async with fake() as api, api.client() as client:
            api.faults.append(fault(409))
            with pytest.raises(Conflict):
                await client.patch(
                    ConfigMap, "a", [{"op": "remove", "path": "/data"}], "ns", how=PatchType.JSON, version="7"
                )
            assert api.headers[-1]["Content-Type"] == "application/json-patch+json"

    virtual(story)


def test_a_closed_client_says_so(virtual, fake):
    async def story():
        async with fake() as api:
            async with api.client() as client:
                await client.list(ConfigMap)
            with pytest.raises(Unavailable, match="closed"):
                await client.list(ConfigMap)

    virtual(story)


def test_the_limiter_spaces_requests_and_serves_them_in_order(virtual, fake):
    async def story():
        async with fake() as api, api.client(qps=10, burst=2) as client:
            loop = asyncio.get_running_loop()
            began = loop.time()
            await asyncio.gather(
                *(client.request("GET", f"/api/v1/namespaces/ns/x{n:02d}") for n in range(12)), return_exceptions=True
            )
            assert loop.time() - began >= 1.0  # two at once, ten more at ten a second
            order = api.requests("GET")
            assert order == sorted(order)

    virtual(story)


def test_requests_are_counted(virtual, fake, fault):
    from prometheus_client import REGISTRY

    async def story():
        async with fake() as api, api.client() as client:
            host = f"127.0.0.1:{api.port}"

            def count(code):
                labels = {"code": code, "method": "GET", "host": host}
                return REGISTRY.get_sample_value("rest_client_requests_total", labels) or 0

            before = count("200"), count("429")  # of an earlier server that had this port
            api.faults.append(fault(429))
            await client.list(ConfigMap)
            assert (count("200") - before[0], count("429") - before[1]) == (1, 1)

    virtual(story)
