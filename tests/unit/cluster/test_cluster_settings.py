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


def test_a_directory_that_others_may_write_to_is_refused_before_anything_is_made(tmp_path):
    layout = DataLayout(tmp_path / "m")
    layout.check_safe()  # there is nothing yet
    layout.root.mkdir(mode=0o700)
    layout.check_safe()
    layout.root.chmod(0o777)
    with pytest.raises(UsageError, match="can be written by others"):
        layout.check_safe()
    layout.root.rmdir()
    layout.root.write_text("a file")
    with pytest.raises(UsageError, match="is not a directory"):
        layout.check_safe()


@pytest.mark.root
def test_a_directory_of_another_user_is_refused(tmp_path):
    layout = DataLayout(tmp_path / "m")
    layout.root.mkdir(mode=0o700)
    os.chown(layout.root, 1000, 1000)
    with pytest.raises(UsageError, match=r"belongs to another user \(uid 1000\)"):
        layout.check_safe()


def test_folders_are_for_their_owner_only(tmp_path):
    layout = DataLayout(tmp_path / "m")
    layout.make()
    assert [path.stat().st_mode & 0o777 for path in (layout.root, layout.api, layout.logs, layout.run)] == [0o700] * 4


def settings(data_dir, **changes):
    made = UpSettings(data_dir, **changes)
    made.layout.make()
    return made


def test_a_data_directory_of_one_node_is_not_started_with_two(tmp_path):
    assert not settings(tmp_path).continuing().is_shared
    with pytest.raises(UsageError, match=r"of one node.*without --nodes, or give another --data-dir for 2 nodes"):
        settings(tmp_path, nodes=2).continuing()
    assert not settings(tmp_path).continuing().is_shared  # the refusal changed nothing


def test_a_shared_pool_stays_shared_whatever_the_number_of_nodes(tmp_path):
    assert settings(tmp_path, nodes=2).continuing().is_shared
    assert settings(tmp_path, nodes=1).continuing().is_shared
    assert settings(tmp_path, nodes=3).continuing().is_shared


def test_a_data_directory_keeps_its_kind_of_driver(tmp_path):
    settings(tmp_path).continuing()
    with pytest.raises(UsageError, match="of Moorage's own driver"):
        settings(tmp_path, driver="unix:///run/csi.sock").continuing()


def test_a_damaged_record_is_named(tmp_path):
    settings(tmp_path).layout.record.write_text("{")
    with pytest.raises(UsageError, match=r"cluster\.json is damaged"):
        settings(tmp_path).continuing()
