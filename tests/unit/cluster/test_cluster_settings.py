"""What `moorage up` refuses before it starts anything."""

import os
from pathlib import Path

import pytest

from moorage.cluster.layout import DataLayout
from moorage.cluster.settings import CannotRunHere, UpSettings
from moorage.errors import UsageError


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 17}, "1 to 16"),
        ({"nodes": 2, "driver": "unix:///run/csi.sock"}, "serves one node"),
        ({"driver": "my-driver --socket /run/csi.sock"}, "{endpoint}"),
        ({"data_dir": Path("/") / ("x" * 100)}, "107 characters"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(changes, says):
    with pytest.raises(UsageError, match=says.replace("{", r"\{").replace("}", r"\}")):
        UpSettings(**{"data_dir": Path("/tmp/m"), **changes}).checked()


def test_without_root_it_says_what_it_cannot_do_and_what_still_works(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRunHere, match=r"needs root.*mount.*moorage apiserver") as refused:
        UpSettings(data_dir=Path("/tmp/m")).checked()
    assert refused.value.code == "FAILED_PRECONDITION"


def test_a_driver_is_a_socket_or_a_command():
    assert UpSettings(Path("/tmp/m"), driver="unix:///run/csi.sock").has_foreign_socket
    assert UpSettings(Path("/tmp/m"), driver="/run/csi.sock").has_foreign_socket
    assert not UpSettings(Path("/tmp/m"), driver="/opt/driver --endpoint {endpoint}").has_foreign_socket


def test_several_nodes_share_their_pool_and_one_does_not():
    assert not UpSettings(Path("/tmp/m")).is_shared
    assert UpSettings(Path("/tmp/m"), nodes=3).is_shared
    assert UpSettings(Path("/tmp/m"), nodes=2).node_names == ["node-1", "node-2"]


def test_folders_are_for_their_owner_only(tmp_path):
    layout = DataLayout(tmp_path / "m")
    layout.make()
    assert [path.stat().st_mode & 0o777 for path in (layout.root, layout.api, layout.logs, layout.run)] == [0o700] * 4
