"""A plugin in this process, on a pool in a temporary directory; no root is needed for these."""

import contextlib
import dataclasses

import pytest
from tests.support.plugin_caller import Caller

from moorage.csi.client import CsiClient
from moorage.csi.errors import CsiError
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings


@pytest.fixture
def settings(tmp_path):
    pools = {"default": tmp_path / "pool", "second": tmp_path / "second"}
    return PluginSettings(
        endpoint=f"unix://{tmp_path}/csi.sock", node_id="node-1", pools=pools, stop_grace_s=20, reserve_fraction=0
    )


@pytest.fixture
def changed_settings():
    """What a test wants to be different."""
    return {}


@pytest.fixture
async def parts(settings, changed_settings):
    async with serve(dataclasses.replace(settings, **changed_settings)) as parts:
        yield parts


@pytest.fixture
async def client(parts):
    async with CsiClient(parts.settings.endpoint, timeout_s=60) as client:
        yield client


@pytest.fixture
async def caller(client, tmp_path):
    return Caller(client, tmp_path)


@pytest.fixture
def refused():
    @contextlib.contextmanager
    def check(code: str, match: str = ""):
        with pytest.raises(CsiError) as caught:
            yield caught
        assert caught.value.code == code, str(caught.value)
        assert caught.value.message
        assert match in caught.value.message, caught.value.message

    return check
