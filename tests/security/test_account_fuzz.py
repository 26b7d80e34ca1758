"""Thousands of requests that almost fit: none may be an unexpected error, none may leave a traceback in the log."""

import asyncio
import logging

import aiohttp
from tests.support.accounts import serve_accounts
from tests.support.requests_at_random import RandomRequests
from tests.support.stall import no_stall

SEED, REQUESTS = 26, 2_000


async def test_requests_at_random_are_answered(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    made = RandomRequests(SEED)
    found: dict[int, int] = {}
    async with serve_accounts(tmp_path / "api") as cluster:
        for path, document in made.first():
            await cluster.admin.make(path, document)
        with no_stall():
            for _ in range(REQUESTS):
                method, path, body, headers = made.next()
                status, text = await answer(cluster, method, path, body, headers)
                found[status] = found.get(status, 0) + 1
                assert status < 500 or status == 501, (method, path, body[:500], headers, text[:500])
        assert (await cluster.admin("GET", "/api/v1/nodes"))[0] == 200
    assert "Traceback" not in caplog.text
    assert found[200] + found[201] > REQUESTS / 10, found


async def answer(cluster, method, path, body, headers):
    url = cluster.server.insecure_url + path
    try:
        async with (
            asyncio.timeout(30),
            cluster.admin.session.request(
                method, url, data=body or None, headers=headers, skip_auto_headers=["Accept"]
            ) as response,
        ):
            return response.status, await response.text(errors="replace")
    except (ValueError, aiohttp.ClientError) as error:  # the client does not send this
        return 0, str(error)
