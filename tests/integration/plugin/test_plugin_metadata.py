"""Changed blocks of a large volume: thousands of ranges come in bounded messages, and in any pieces."""

import os

import pytest
from tests.support.plugin_caller import MIB, block

from moorage.csi import csi_pb2 as pb

pytestmark = pytest.mark.root

SIZE = 1 << 40
EXTENTS = 10_000
STRIDE = 100 * MIB


@pytest.fixture
def in_own_process():
    return True


@pytest.fixture
def flags():
    return ["--overcommit=1000"]


def write_extents(image, byte):
    fd = os.open(image, os.O_RDWR)
    try:
        for number in range(EXTENTS):
            os.pwrite(fd, byte * 4096, number * STRIDE)
        os.fsync(fd)
    finally:
        os.close(fd)


def resident_bytes(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


async def test_ten_thousand_changes_in_a_tebibyte(plugin, node, pool):
    volume = (await node.create("raw", block(), SIZE)).volume_id
    image = pool / "volumes" / volume / "data"
    base = (await node.snapshot(volume, "base")).snapshot_id
    write_extents(image, b"x")
    target = (await node.snapshot(volume, "target")).snapshot_id
    before = resident_bytes(plugin.pid)

    async def asked(start=0, most=0):
        request = pb.GetMetadataDeltaRequest(
            base_snapshot_id=base, target_snapshot_id=target, starting_offset=start, max_results=most
        )
        return [message async for message in node.client.GetMetadataDelta(request)]

    messages = await asked()
    found = [(each.byte_offset, each.size_bytes) for message in messages for each in message.block_metadata]
    assert found == [(number * STRIDE, 4096) for number in range(EXTENTS)]
    assert {message.volume_capacity_bytes for message in messages} == {SIZE}
    assert all(len(message.block_metadata) <= 4096 for message in messages)
    assert len(messages) >= 3
    middle = EXTENTS // 2 * STRIDE
    pieces = await asked(middle, 1000)
    assert all(len(message.block_metadata) <= 1000 for message in pieces)
    assert sum(len(message.block_metadata) for message in pieces) == EXTENTS // 2
    assert pieces[0].block_metadata[0].byte_offset == middle

    allocated = pb.GetMetadataAllocatedRequest(snapshot_id=target, max_results=2500)
    sizes = [len(message.block_metadata) async for message in node.client.GetMetadataAllocated(allocated)]
    assert sizes == [2500] * 4
    assert resident_bytes(plugin.pid) - before < 50 * MIB
