"""A new driver project: a driver that works, its tests, its image, its manifests and its pipeline.

Owns: the names in it, and which files it has. Nothing is written over.
Start reading at: `files_of`, `write`.
"""

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from moorage import __version__
from moorage.authoring.manifests import manifests
from moorage.errors import UsageError

KINDS = {"directory": "Folders", "image": "Images", "remote": "Remote", "block": "Devices"}
SIDECARS = ("moorage", "official")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST_NAME = 40
_TEMPLATES = {
    "README.md": "README.md",
    "Containerfile": "Containerfile",
    "ci.yaml": ".github/workflows/ci.yaml",
    "test_driver.txt": "tests/test_driver.py",
}


@dataclass(frozen=True)
class Project:
    """What an author asks for."""

    name: str
    kind: str = "directory"
    domain: str = "example.org"
    sidecars: str = "moorage"

    def checked(self) -> "Project":
        """Return this project. Raises UsageError for a name or a kind that cannot be."""
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            raise UsageError(f"{self.name!r} is not a name; use up to 40 of a-z, 0-9 and -, beginning with a letter")
        if self.kind not in KINDS:
            raise UsageError(f"--kind {self.kind}: choose from {', '.join(KINDS)}")
        if self.sidecars not in SIDECARS:
            raise UsageError(f"--sidecars {self.sidecars}: choose from {', '.join(SIDECARS)}")
        if not re.fullmatch(r"[a-z0-9]+([-.][a-z0-9]+)*", self.domain) or len(self.driver_name) > 63:
            raise UsageError(f"--domain {self.domain}: the driver's name {self.driver_name} is no name of a CSI driver")
        return self

    @property
    def driver_name(self) -> str:
        return f"{self.name}.{self.domain}"

    @property
    def class_name(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("-"))


def files_of(project: Project) -> dict[str, str]:
    """Return the text of every file, by its path in the project."""
    project.checked()
    words = {
        "@NAME@": project.name,
        "@DRIVER@": project.driver_name,
        "@CLASS@": project.class_name,
        "@KIND@": project.kind,
        "@VERSION@": __version__,
        "@CHECK_FLAGS@": ', "--fs-type", "xfs", "--size", "320Mi"' if project.kind in ("image", "block") else "",
        "@OPTIONS@": ', "--option", f"root={directory}"' if project.kind == "remote" else "",
    }
    found = {"driver.py": _driver(project)}
    for template, path in _TEMPLATES.items():
        text = _read("templates", template)
        for word, value in words.items():
            text = text.replace(word, value)
        found[path] = text
    documents = manifests(project.name, project.driver_name, project.kind, project.sidecars)
    found["deploy/driver.yaml"] = yaml.safe_dump_all(documents, sort_keys=False, width=120)
    found["requirements.txt"] = f"moorage>={__version__}\n"
    found[".gitignore"] = "__pycache__/\n.pytest_cache/\n.venv/\n"
    return found


def write(project: Project, directory: Path) -> list[Path]:
    """Write the project into a new directory and return its files. Raises UsageError if there is something."""
    texts = files_of(project)
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} exists and is not empty; choose another name or directory")
    written = []
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    return written


def _driver(project: Project) -> str:
    """Return the example of this kind with the names of the project."""
    text, example = _read("kinds", f"{project.kind}.py"), KINDS[project.kind]
    old_name = f"{example.lower()}.example.org"
    text = text.replace(old_name, project.driver_name).replace(f"{example}().main", f"{project.class_name}().main")
    text = text.replace(f"class {example}(", f"class {project.class_name}(")
    text = text.replace(f"python examples/drivers/{example.lower()}.py", "python driver.py")
    return text.replace(f"/tmp/{example.lower()}/", f"/tmp/{project.name}/")


def _read(*path: str) -> str:
    return resources.files("moorage.authoring").joinpath(*path).read_text()
