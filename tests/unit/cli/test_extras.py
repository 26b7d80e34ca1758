"""What a bare installation can do, and what it says about the rest. Imports of the extras' packages are blocked."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from moorage.cli.extras import EXTRAS, NEEDS
from moorage.cli.main import COMMANDS

PYPROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
BLOCKED = {*sum(EXTRAS.values(), ()), "kubernetes", "hpack"}
BLOCK = f"import sys\nfor name in {sorted(BLOCKED)!r}: sys.modules[name] = None\n"
MODULES = {"PyJWT": "jwt", "google-re2": "re2", "cel-expr-python": "cel_expr_python"}
BARE_PARTS = ("sdk", "insight", "conformance", "csi", "host", "kube", "plugin", "storage", "upkeep")


COMMAND = """
import contextlib, io, json
from moorage.cli.main import main
for line in json.load(sys.stdin):
    out, err, sys.argv = io.StringIO(), io.StringIO(), ["moorage", *line]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


def bare(code: str, text: str = "") -> str:
    """What the code prints where the packages of the extras cannot be imported."""
    ran = subprocess.run([sys.executable, "-c", BLOCK + code], input=text, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def commands(*lines: list[str]) -> list[list]:
    """Exit status, output and errors of each command line, run in one process."""
    return [json.loads(line) for line in bare(COMMAND, json.dumps(lines)).splitlines()]


def modules_of(requirements: list[str]) -> set[str]:
    names = {re.split(r"[><=\[]", each)[0] for each in requirements}
    return {MODULES.get(name, name) for name in names}


def test_every_module_of_the_bare_parts_can_be_imported():
    bare(
        "import importlib, pkgutil, moorage\n"
        f"for part in {BARE_PARTS!r}:\n"
        "    package = importlib.import_module('moorage.' + part)\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if not found.name.endswith(('__main__', '.pytest')):\n"  # the plugin of pytest needs pytest
        "            importlib.import_module(found.name)\n"
    )


def test_a_bare_installation_has_the_commands_that_look_call_and_check():
    names = ["explain", "trace", "check", "csi", "gc", "plugin", "volume"]
    assert not set(names) & set(NEEDS)
    for status, out, err in commands(*([name, "--help"] for name in names)):
        assert (status, err) == (0, "")
        assert "Usage:" in out


def test_a_driver_loads_neither_the_api_server_nor_its_packages():
    loaded = set(bare("import moorage.sdk\nprint(*sorted(sys.modules))").split())
    assert "moorage.sdk" in loaded
    assert not loaded & {"aiohttp", "typer", "moorage.apiserver", "moorage.kube", "moorage.node"}


def test_a_command_without_its_packages_says_what_to_install():
    missing = {
        ("apiserver", "--data-dir", "d"): "cel_expr_python, cryptography, jwt, re2, uvloop",
        ("controllers",): "uvloop",
        ("sidecars",): "uvloop",
        ("node",): "asyncinotify, cryptography, uvloop",
        ("up",): "asyncinotify, cel_expr_python, cryptography, jinja2, jwt, re2, uvloop",
        ("demo",): "asyncinotify, cel_expr_python, cryptography, jinja2, jwt, re2, uvloop",
        ("volume", "--pool", "p", "export", "a", "b"): "cryptography",
        ("volume", "--pool", "p", "import", "a"): "cryptography",
    }
    for line, ran in zip(missing, commands(*map(list, missing)), strict=True):
        name = f"volume {line[3]}" if line[0] == "volume" else line[0]
        said = f"`moorage {name}` needs packages that are not installed ({missing[line]})"
        assert ran == [1, "", f'Error: {said}: run pip install "moorage[all]"\n']


def test_extras_are_those_of_the_package():
    optional = PYPROJECT["project"]["optional-dependencies"]
    assert set(optional["all"]) == {requirement for extra in EXTRAS for requirement in optional[extra]}
    for extra, modules in EXTRAS.items():
        assert modules_of(optional[extra]) == set(modules)
    assert set(NEEDS) - {"driver run", "volume export", "volume import"} <= set(COMMANDS)
    assert not modules_of(PYPROJECT["project"]["dependencies"]) & BLOCKED
