"""What protection says it did is what was written."""

import logging
from typing import Any

import msgspec
import pytest

from moorage.controllers.protection.run import ClaimProtection
from moorage.kube.cache.caches import Caches
from moorage.kube.cache.informers import Informers
from moorage.kube.control.controller import Controller
from moorage.kube.control.writer import Writer
from moorage.kube.errors import Conflict
from moorage.kube.names import CLAIM_PROTECTION
from moorage.kube.objects import PersistentVolumeClaim

META = {"name": "c", "namespace": "ns", "uid": "u", "resourceVersion": "7", "finalizers": [CLAIM_PROTECTION]}
LEAVING = msgspec.convert({"metadata": META | {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, PersistentVolumeClaim)


class Api:
    """No pods; the first write loses against another one."""

    def __init__(self) -> None:
        self.writes = 0

    async def list(self, _kind, _namespace):
        return type("Listed", (), {"items": []})

    async def patch(self, _kind, _name, _patch, _namespace, **_options):
        self.writes += 1
        if self.writes == 1:
            raise Conflict(409, "Conflict", "the object has been modified")
        return LEAVING


async def test_a_claim_is_reported_as_released_only_when_it_is(caplog):
    caplog.set_level(logging.INFO, logger="moorage")
    api: Any = Api()
    informers = Informers(api)
    caches = Caches(informers)
    caches.claims.remember(LEAVING)
    work = ClaimProtection(api, caches, Writer(api, informers), Controller)
    await work.sync_claim("ns/c")
    with pytest.raises(Conflict):
        await work.sync_namespace("ns")
    assert "released" not in caplog.text
    await work.sync_namespace("ns")
    assert caplog.text.count("released") == 1
