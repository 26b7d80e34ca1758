"""A page over an embedded API server, and a browser that looks at it."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright

from moorage.kube.api.client import Client
from moorage.kube.api.config import from_kubeconfig
from moorage.process import cancel_all
from moorage.testing import serve
from moorage.ui.run import UiSettings
from moorage.ui.run import serve as serve_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Desk:
    """A browser page that is signed in, the cluster behind it, and what the browser complained of."""

    page: Page
    client: Client
    link: str
    complaints: list[str] = field(default_factory=list)

    @property
    def base(self) -> str:
        return self.link.partition("/?")[0]

    async def go(self, path: str) -> None:
        await self.page.goto(self.base + path)


@asynccontextmanager
async def page_server(client: Client, folder: Path, **settings: Any) -> AsyncIterator[str]:
    """Serve the page in this loop; yields the link."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    wanted = UiSettings(token_file=folder / "token", **settings)
    serving = asyncio.create_task(serve_page(client, wanted, ready.set_result))
    try:
        either: list[asyncio.Future[Any]] = [serving, ready]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        yield ready.result()
    finally:
        await cancel_all([serving])


@asynccontextmanager
async def browser_page(**context: Any) -> AsyncIterator[tuple[Page, list[str]]]:
    """Open the system's Chromium; yields a page and what it writes to its console or asks of other hosts."""
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    assert found, "Chromium is missing; scripts/prepare dev installs it"
    complaints: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = await (await browser.new_context(**context)).new_page()
        page.set_default_timeout(20_000)
        page.on(
            "console", lambda said: complaints.append(f"{said.type}: {said.text}") if said.type == "error" else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda sent: None if "://127.0.0.1:" in sent.url else complaints.append(sent.url))
        try:
            yield page, complaints
        finally:
            await browser.close()


@pytest.fixture
async def client(tmp_path):
    async with (
        serve(tmp_path / "api") as server,
        Client(from_kubeconfig(server.kubeconfig), identity="moorage-ui") as client,
    ):
        yield client


@pytest.fixture
async def desk(client, tmp_path):
    """The overview of an empty cluster, with actions allowed. No complaint of the browser may be left."""
    async with page_server(client, tmp_path, allow_actions=True) as link, browser_page() as (page, complaints):
        await page.goto(link)
        yield Desk(page, client, link, complaints)
    assert complaints == []
