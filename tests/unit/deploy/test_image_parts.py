"""The steps that make the image: what is chosen, what is left out, and that packing depends on the content alone."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from tests.support.scripts import load_script


@pytest.fixture
def step(deploy_folder):
    """A script of deploy/image as a module."""

    def load(name: str):
        return load_script(deploy_folder / "image" / f"{name}.py")

    return load


def tree(root, names, mtime):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        os.utime(path, (mtime, mtime))
    (root / "link").symlink_to("a/file")
    os.link(root / "a/file", root / "hard")
    return root


def test_packing_depends_on_names_and_content_alone(step, tmp_path):
    pack = step("pack")
    names = ["a/file", "b/other", "c"]
    one = pack.layer_of(tree(tmp_path / "one", names, 1), 100)
    two = pack.layer_of(tree(tmp_path / "two", names[::-1], 2), 100)
    assert one == two
    (tmp_path / "two/c").write_text("changed")
    assert pack.layer_of(tmp_path / "two", 100) != one


def test_what_only_a_left_out_package_asks_for_is_left_out_too(step):
    pins = """
aiohttp==3.0 \\
    # via
    #   setuptools
    #   moorage (pyproject.toml)
yarl==1.0 \\
    # via aiohttp
setuptools==31.0 \\
    # via moorage (pyproject.toml)
requests==2.0 \\
    # via setuptools
"""
    assert step("packages").wanted(pins) == {"aiohttp": "3.0", "yarl": "1.0"}


def test_the_real_pins_keep_what_moorage_imports_and_drop_the_official_client(step, deploy_folder):
    kept = step("packages").wanted((deploy_folder.parent / "requirements.txt").read_text())
    assert {"grpcio", "protobuf", "aiohttp", "msgspec", "typer", "prometheus-client"} <= kept.keys()
    assert not kept.keys() & {"kubernetes", "requests", "setuptools", "oauthlib"}


def test_the_libraries_of_a_program_are_found_in_its_headers(step, tmp_path):
    needed = step("choose").needed_by
    assert any(name.startswith("libc.so") for name in needed(Path(sys.executable).resolve()))
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\n")
    assert needed(text) == []


def test_the_containerfile_makes_the_same_image_for_those_who_have_a_registry(step, deploy_folder):
    """The same packages, entry point, user and settings; building it takes a base image, which tests have not."""
    containerfile = (deploy_folder / "image/Containerfile").read_text()
    build = (deploy_folder / "image/build").read_text()
    wanted = set(re.findall(r"^packages=(\S+)", build, re.M)[0].split(","))
    installed = re.findall(r"apt-get install -y --no-install-recommends ([^&]+mount) &&", containerfile)[0].split()
    assert wanted - set(installed) == {"util-linux", "dash"}, "every Debian has these two"
    config = step("pack").image_config("0" * 64, "1970-01-01T00:00:00Z", "1")["config"]
    assert f"ENTRYPOINT {json.dumps(config['Entrypoint'])}" in containerfile
    assert f"CMD {json.dumps(config['Cmd'])}" in containerfile
    assert f"USER {config['User']}" in containerfile
    for setting in config["Env"]:
        assert setting in containerfile or setting.startswith("PATH="), setting
    removed = containerfile[containerfile.index("rm -rf") : containerfile.index("COPY src/moorage")]
    for name in step("packages").LEFT_OUT:
        assert "/site/" + name.replace("-", "_") in removed
