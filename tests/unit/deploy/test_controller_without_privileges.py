"""What a controller without devices or mounts decides about copies of volumes that nodes have attached."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moorage.host import loop
from moorage.host.errors import HostError
from moorage.storage.copies import CopyPlan, Job, plan_copy
from moorage.storage.errors import InUseCopyRefused
from moorage.storage.model import InUse, VolumeKind
from moorage.storage.usage import HostUse


def context(fstype: str) -> Any:
    config = SimpleNamespace(freeze_bound_s=10.0, copy_freeze_bound_s=60.0)
    has_reflinks = fstype in ("xfs", "btrfs")
    return SimpleNamespace(config=config, fstype=fstype, is_btrfs=fstype == "btrfs", copies_by_reflink=has_reflinks)


def job(kind: VolumeKind, in_use: InUse) -> Job:
    return Job("vol", kind, Path("/pool/volumes/vol/data"), "/pool/tmp/x", in_use)


@pytest.mark.parametrize(
    ("kind", "fstype", "in_use", "reason"),
    [
        (VolumeKind.IMAGE, "xfs", InUse.FREEZE, ""),
        (VolumeKind.IMAGE, "nfs4", InUse.FREEZE, "has no reflinks"),
        (VolumeKind.DIRECTORY, "xfs", InUse.FREEZE, "cannot copy a directory in one moment"),
        (VolumeKind.DIRECTORY, "nfs4", InUse.FREEZE, "has no reflinks"),
        (VolumeKind.DIRECTORY, "nfs4", InUse.LIVE, ""),
        (VolumeKind.DIRECTORY, "xfs", InUse.LIVE, ""),
        (VolumeKind.DIRECTORY, "btrfs", InUse.FREEZE, ""),
    ],
)
def test_an_attached_volume_is_copied_in_one_moment_or_refused(kind, fstype, in_use, reason):
    """Whether a node uses it is said by its attachment: what is mounted there is not seen from here."""
    if not reason:
        assert plan_copy(job(kind, in_use), HostUse(), context(fstype), ["node-1"]).freeze is False
        return
    with pytest.raises(InUseCopyRefused, match=f"attached to node-1, .* {reason}; detach it first"):
        plan_copy(job(kind, in_use), HostUse(), context(fstype), ["node-1"])


@pytest.mark.parametrize("nodes", [[], ["node-1"]])
def test_members_of_a_group_are_not_copied_while_they_change(nodes):
    """A group snapshot is of one moment; files that are copied one after the other are not."""
    use = HostUse() if nodes else HostUse(mountpoints=("/mnt/pod",))
    alone = plan_copy(job(VolumeKind.DIRECTORY, InUse.LIVE), use, context("xfs"), nodes)
    assert alone == CopyPlan(False, 0.0)
    with pytest.raises(InUseCopyRefused) as refused:
        plan_copy(job(VolumeKind.DIRECTORY, InUse.LIVE), use, context("xfs"), nodes, is_group=True)
    assert "snapshotInUse" not in str(refused.value)


@pytest.mark.parametrize("kind", list(VolumeKind))
def test_a_volume_at_rest_is_copied(kind):
    assert plan_copy(job(kind, InUse.FREEZE), HostUse(), context("nfs4")) == CopyPlan(False, 0.0)


def test_a_device_that_cannot_be_made_is_an_error_of_the_host(monkeypatch):
    """Which the callers take as: no such device here."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "mknod", refuse)
    with pytest.raises(HostError, match="make /dev/loop999999: Operation not permitted"):
        loop.ensure_node(999999)
