"""Rules for every answer of the whole run, and what the run has left behind.

Owns: the last checks. They make few calls of their own; they look at what was collected.
"""

import asyncio
from contextlib import suppress

from moorage.conformance import files
from moorage.conformance.bench import Bench
from moorage.conformance.checks.basics import CREATE, SNAPSHOT
from moorage.conformance.checks.lists import LIST, LIST_SNAPSHOTS, listed
from moorage.conformance.listing import snapshot_entries
from moorage.conformance.model import LeftBehind, Stage, check, fail
from moorage.csi import csi_pb2 as pb
from moorage.csi.errors import CsiError

_DETACHED_S = 5.0  # the kernel detaches a loop device after its last user has closed it


def _report(bench: Bench, name: str) -> None:
    if found := bench.session.violations.get(name):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        fail(found[0] + more)


@check("Answers.messages", "Every error has a message, because people read it.", stage=Stage.LAST)
async def messages(bench: Bench) -> None:
    _report(bench, "Answers.messages")


@check(
    "Answers.sizes",
    "No string, map or node_id in an answer is larger than CSI allows: 128 bytes, 4 KiB, 256 bytes.",
    stage=Stage.LAST,
)
async def sizes(bench: Bench) -> None:
    _report(bench, "Answers.sizes")


@check("Answers.numbers", "No size or count in an answer is negative.", stage=Stage.LAST)
async def numbers(bench: Bench) -> None:
    _report(bench, "Answers.numbers")


@check(
    "Secrets.not-echoed",
    "The value of a secret is in no answer: not in a message, a context or an id.",
    CREATE,
    stage=Stage.LAST,
)
async def secrets(bench: Bench) -> None:
    extra = {**bench.config.secrets, "moorage-check": bench.session.sentinel}
    with suppress(CsiError):
        volume = await bench.make(bench.create_request(secrets=extra))
        await bench.client.DeleteVolume(_deletion(volume.volume_id, extra))
        bench.deleted.add(volume.volume_id)
    wrong = bench.create_request(secrets=extra)
    wrong.ClearField("volume_capabilities")
    with suppress(CsiError):
        await bench.client.CreateVolume(wrong)
    if bench.has(SNAPSHOT):
        request = bench.snapshot_request(bench.unknown_id())
        request.secrets.update(extra)
        with suppress(CsiError):
            await bench.client.CreateSnapshot(request)
    _report(bench, "Secrets.not-echoed")


def _deletion(volume_id: str, secrets: dict[str, str]) -> pb.DeleteVolumeRequest:
    return pb.DeleteVolumeRequest(volume_id=volume_id, secrets=secrets)


@check("Leaks.volumes", "No volume that the run made and deleted is left.", CREATE, LIST, stage=Stage.LAST)
async def volumes(bench: Bench) -> None:
    left = sorted(set(await listed(bench)) & set(bench.session.owned))
    if left:
        raise LeftBehind(f"{len(left)} volumes are left: {', '.join(left[:5])}")


@check(
    "Leaks.snapshots", "No snapshot that the run took and deleted is left.", SNAPSHOT, LIST_SNAPSHOTS, stage=Stage.LAST
)
async def snapshots(bench: Bench) -> None:
    found = {one.snapshot_id for one in await snapshot_entries(bench.client, secrets=bench.config.secrets)}
    left = sorted(found & set(bench.session.owned))
    if left:
        raise LeftBehind(f"{len(left)} snapshots are left: {', '.join(left[:5])}")


@check("Leaks.loop-devices", "No loop device that was behind a published volume is left.", CREATE, stage=Stage.LAST)
async def loop_devices(bench: Bench) -> None:
    for _ in range(int(_DETACHED_S / 0.1)):
        left = [number for number, backing in bench.session.loop_devices.items() if files.is_same_loop(number, backing)]
        if not left:
            return
        await asyncio.sleep(0.1)
    raise LeftBehind(f"{len(left)} loop devices are left: {', '.join(f'/dev/loop{number}' for number in left[:5])}")


@check("Leaks.clean-up", "The clean-up after each check succeeds.", stage=Stage.LAST)
async def clean_ups(bench: Bench) -> None:
    for owner, sentence in bench.session.deferred:
        if owner not in bench.session.broken:
            fail(sentence, f"it succeeds, as it did in {owner}")


@check("Leaks.files", "Nothing is left in the directories that the driver could mount in.", stage=Stage.LAST)
async def left_files(bench: Bench) -> None:
    workdir = bench.config.workdir
    left = sorted(workdir.iterdir())[:5] if workdir.is_dir() else []
    if left:
        raise LeftBehind(f"{workdir} holds {', '.join(path.name for path in left)}")
