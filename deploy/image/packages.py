"""Put Moorage and the Python packages that it runs with into a root filesystem, from the prepared environment.

Owns: which packages those are. They were installed from requirements.txt with their hashes checked, so copying them is
as good as installing them again, and takes no network. Usage: packages.py ROOT
"""

import importlib.metadata
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
# The embedded API server alone evaluates rules of custom kinds; its libraries are two thirds of all packages.
LEFT_OUT = {"setuptools", "cel-expr-python", "google-re2"}
_NOT_NEEDED = re.compile(r"(^|/)(__pycache__|tests?|testing)(/|$)|\.(pyi|pyx|pxd|c|h|cpp|pyc)$")
_NOT_FROM_WHEELS = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}  # differ from machine to machine
_COMMAND = """#!/usr/bin/python3
import sys
from moorage.cli.main import main
sys.exit(main())
"""


def main() -> None:
    root = Path(sys.argv[1])
    site = root / "usr/lib/python3/dist-packages"
    for name, version in sorted(wanted((HERE / "requirements.txt").read_text()).items()):
        copy_package(name, version, site)
    source = HERE / "src/moorage"
    left_out = shutil.ignore_patterns("__pycache__", "*.pyi", "testing")
    shutil.copytree(source, site / "moorage", ignore=left_out)
    command = root / "usr/bin/moorage"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(_COMMAND)
    command.chmod(0o755)


def wanted(pins: str) -> dict[str, str]:
    """The pinned packages, without those that only a package which is left out asks for."""
    versions: dict[str, str] = {}
    askers: dict[str, set[str]] = {}
    name = ""
    for line in pins.splitlines():
        if found := re.match(r"([A-Za-z0-9._-]+)==([^ ]+)", line):
            name = found[1]
            versions[name] = found[2]
        elif name and (found := re.match(r"    #(?: via)? +([A-Za-z0-9._-]+)", line)):
            askers.setdefault(name, set()).add(found[1])
    kept = {"moorage"}
    while more := {n for n in versions if n not in kept | LEFT_OUT and askers.get(n, set()) & kept}:
        kept |= more
    return {name: versions[name] for name in sorted(kept - {"moorage"})}


def copy_package(name: str, version: str, site: Path) -> None:
    package = importlib.metadata.distribution(name)
    if package.version != version:
        sys.exit(
            f"image: the environment has {name} {package.version}, requirements.txt says {version}: scripts/prepare"
        )
    for file in package.files or []:
        path = file.as_posix()
        if path.startswith("..") or _NOT_NEEDED.search(path) or file.name in _NOT_FROM_WHEELS:
            continue
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(file.locate()), target)


if __name__ == "__main__":
    main()
