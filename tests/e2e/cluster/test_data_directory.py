"""One data directory, one cluster: a second one touches nothing, another shape is refused at once."""

import subprocess
import sys

import pytest

from moorage.host import mountinfo

pytestmark = pytest.mark.root


def up(data_dir, *flags):
    command = [sys.executable, "-m", "moorage.cli.main", "up", "--data-dir", str(data_dir), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def pool_mounts(stack):
    return [mount.target for mount in mountinfo.mounts_below(stack.data_dir)]


@pytest.fixture
def stack(stack_at):
    return stack_at("one", "--pool-size", "1Gi")


def test_a_second_cluster_on_the_same_directory_touches_nothing(stack):
    before = pool_mounts(stack)
    assert before
    code, said = up(stack.data_dir)
    assert code == 2
    assert f"(process {stack.process.pid}) runs on {stack.data_dir}" in said
    assert "unmounted" not in said
    assert pool_mounts(stack) == before
    assert stack.names("nodes") == ["node-1"]


def test_another_shape_is_refused_before_anything_starts(stack):
    stack.stop()
    code, said = up(stack.data_dir, "--nodes", "2")
    assert code == 2
    assert "holds a cluster of one node" in said
    assert pool_mounts(stack) == []
    stack.start()
    assert stack.names("nodes") == ["node-1"]
