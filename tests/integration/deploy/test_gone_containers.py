"""Loop devices that a container attached are found again by the container that takes its place."""

import subprocess

import pytest

from moorage.host import loop

pytestmark = pytest.mark.root


@pytest.fixture
def device_of_a_gone_container(tmp_path):
    """A file of a pool, attached by a process that saw the pool at another path, in namespaces that are gone."""
    pool, inside = tmp_path / "pool", tmp_path / "inside"
    data = pool / "volumes" / "v1" / "data"
    data.parent.mkdir(parents=True)
    inside.mkdir()
    data.write_bytes(b"\0" * (1 << 20))
    script = f"mount --bind {pool} {inside} && losetup --find --show {inside}/volumes/v1/data"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=True)
    device = loop.at(done.stdout.strip())
    yield pool, data, device.number
    loop.detach(device)
    assert loop.wait_detached(device)


def test_a_device_is_known_by_its_file_and_not_by_the_path_that_is_gone(device_of_a_gone_container):
    pool, data, number = device_of_a_gone_container
    assert not loop.at(number).backing_file.startswith(str(pool)), "the kernel tells a path of the gone container"
    assert [(d.number, d.backing_file) for d in loop.attached(pool)] == [(number, str(data))]
    assert [d.backing_file for d in loop.attached(data.parent)] == [str(data)]
    assert loop.is_below(number, pool)


def test_a_device_of_another_folder_is_not_taken_for_ours(device_of_a_gone_container, tmp_path):
    _, _, number = device_of_a_gone_container
    other = tmp_path / "other" / "volumes" / "v1"
    other.mkdir(parents=True)
    (other / "data").write_bytes(b"x")  # the same names, another file
    assert loop.attached(tmp_path / "other") == []
    assert not loop.is_below(number, tmp_path / "other")
