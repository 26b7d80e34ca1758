"""The package is Python alone: one wheel for every machine, and no compiler to install it."""

import tomllib
from pathlib import Path

from setuptools.config.pyprojecttoml import apply_configuration
from setuptools.dist import Distribution

PROJECT = Path(__file__).parents[3]
COMPILED = (".c", ".h", ".pyx", ".so", ".o")


def test_nothing_is_compiled():
    assert not (PROJECT / "setup.py").exists()
    assert not [path for path in (PROJECT / "src/moorage").rglob("*") if path.suffix in COMPILED]


def test_the_wheel_is_for_every_machine(monkeypatch):
    monkeypatch.chdir(PROJECT)
    distribution = apply_configuration(Distribution(), PROJECT / "pyproject.toml")
    assert distribution.is_pure()
    assert not distribution.has_ext_modules()


def test_it_installs_no_kubernetes_client_and_pins_name_no_host():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["all"]]
    assert not [name for name in needed if name.startswith(("kubernetes", "hpack"))]
    pins = (PROJECT / "requirements.txt").read_text()
    assert "\nkubernetes==" not in pins
    assert "://" not in pins
