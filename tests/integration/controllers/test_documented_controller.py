"""The controller of the page on the controller runtime, exactly as printed there."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.integration.controllers.replay import Stage

from moorage.controllers.run import CONTROLLERS
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim

PAGE = Path(__file__).parents[3] / "docs" / "contributing" / "controller-runtime.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The printed decisions and wiring as one module, registered under the printed name."""
    blocks = re.findall(r"```python title=\"\w+\"\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = ModuleType("team_labels")
    exec(compile("\n".join(blocks), str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(CONTROLLERS, "team-labels", module.__name__)
    return module


def test_the_wiring_is_as_short_as_the_page_says() -> None:
    wiring = re.findall(r"```python title=\"wiring\"\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    body = wiring.partition("async def run")[2].splitlines()[1:]
    assert len([line for line in body if line.strip()]) <= 10


async def test_the_printed_controller_keeps_labels_as_those_of_the_claims(stage: Stage, example: ModuleType) -> None:
    client, resources = stage.client, {"requests": {"storage": "1Gi"}}
    reference = {"namespace": "default", "name": "data"}
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "csi": {"driver": "d", "volumeHandle": "h"},
        "claimRef": reference,
    }
    await client.create(PersistentVolume, {"metadata": {"name": "v", "labels": {"tier": "1"}}, "spec": spec})
    claim = {
        "metadata": {"name": "data", "labels": {"team": "red"}},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": resources, "volumeName": "v", "storageClassName": ""},
    }
    await stage.start(("team-labels", "protection"))
    await client.create(PersistentVolumeClaim, claim, "default")

    async def labels() -> dict[str, str]:
        await stage.settle()
        return (await client.get(PersistentVolume, "v")).labels

    assert await labels() == {"tier": "1", "team": "red"}
    await client.patch(PersistentVolumeClaim, "data", {"metadata": {"labels": {"team": "blue"}}}, "default")
    assert await labels() == {"tier": "1", "team": "blue"}
    await client.patch(PersistentVolume, "v", {"metadata": {"labels": {"team": "forged"}}})
    assert await labels() == {"tier": "1", "team": "blue"}
    await stage.stop()
    await client.delete(PersistentVolumeClaim, "data", "default")
    await stage.start(("team-labels", "protection"))
    assert await labels() == {"tier": "1"}
