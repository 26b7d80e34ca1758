"""What `moorage driver new` writes."""

import ast
import re

import kubernetes_validate
import pytest
import yaml

from moorage.authoring.project import KINDS, SIDECARS, Project, files_of, write
from moorage.errors import UsageError


@pytest.mark.parametrize("sidecars", SIDECARS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_project_has_no_name_of_the_example_left_and_valid_manifests(kind, sidecars):
    files = files_of(Project("my-disks", kind, "storage.test", sidecars))
    assert {"README.md", "Containerfile", "tests/test_driver.py", ".github/workflows/ci.yaml"} <= set(files)
    for path, text in files.items():
        assert not re.search("@[A-Z_]+@", text), path
        assert f"{KINDS[kind].lower()}.example.org" not in text, path
        if path.endswith(".py"):
            ast.parse(text)
    assert "class MyDisks(Driver):" in files["driver.py"]
    documents = list(yaml.safe_load_all(files["deploy/driver.yaml"]))
    for document in documents:
        kubernetes_validate.validate(document, "1.34", strict=True)
    drivers = [each for each in documents if each["kind"] == "CSIDriver"]
    assert [each["metadata"]["name"] for each in drivers] == ["my-disks.storage.test"]
    assert drivers[0]["spec"]["attachRequired"] == (kind == "block")


def test_storage_of_one_node_is_provisioned_there():
    def workloads(kind):
        documents = yaml.safe_load_all(files_of(Project("d", kind))["deploy/driver.yaml"])
        return {each["kind"]: each for each in documents if each["kind"] in ("DaemonSet", "StatefulSet")}

    local, shared = workloads("image"), workloads("remote")
    containers = local["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert "--services=controller,node" in containers[0]["args"]
    assert "--node-deployment" in containers[1]["args"]
    assert set(local) == {"DaemonSet"}
    assert set(shared) == {"DaemonSet", "StatefulSet"}


@pytest.mark.parametrize(
    "project",
    [
        Project("Upper"),
        Project("../x"),
        Project("a" * 41),
        Project("d", "tape"),
        Project("d", domain="with space"),
        Project("d", sidecars="none"),
    ],
)
def test_what_cannot_be_is_refused(project):
    with pytest.raises(UsageError):
        files_of(project)


def test_nothing_is_written_over(tmp_path):
    write(Project("d"), tmp_path / "d")
    (tmp_path / "d" / "driver.py").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        write(Project("d"), tmp_path / "d")
    assert (tmp_path / "d" / "driver.py").read_text() == "mine"
