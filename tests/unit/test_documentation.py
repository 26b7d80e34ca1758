"""The documentation agrees with the code: generated pages, links to files, and names in module docstrings."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
from scripts import docs

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for path in (ROOT / "src/moorage").rglob("*.py") if "generated" not in path.parts)
# How many names of a package do not exist yet; a number may only be lowered.
STILL_MISSING = {
    "apiserver": 5,
    "cluster": 2,
    "controllers": 15,
    "host": 1,
    "insight": 1,
    "kube": 3,
    "node": 9,
    "plugin": 5,
    "sidecars": 8,
    "storage": 3,
}
START = re.compile(r"Start reading at:(.*?)(?:\n\n|\n[A-Z][\w ]*:|\Z)", re.DOTALL)


@pytest.mark.parametrize("name", docs.PARTS)
def test_every_generated_part_is_on_a_page(name):
    marker = f"<!-- generated: {name} -->"
    assert [path for path in docs.DOCS.rglob("*.md") if marker in path.read_text()]


def test_generated_pages_are_up_to_date():
    assert docs.stale() == [], "run: make docs"


def test_a_changed_page_is_noticed_and_rewritten():
    page = "# Title\n\n<!-- generated: figures -->\nold\n<!-- end -->\n\nText by hand.\n"
    made = docs.render(page)
    assert "old" not in made
    assert made.startswith("# Title\n\n<!-- generated: figures -->\n\n| promise |")
    assert made.endswith("<!-- end -->\n\nText by hand.\n")
    assert docs.render(made) == made


def test_every_promise_names_a_script_that_exists():
    promises = json.loads(docs.FIGURES.read_text())
    assert len({each["promise"] for each in promises}) == len(promises)
    for each in promises:
        assert (ROOT / each["command"].split()[0]).is_file(), each


def test_every_page_that_code_names_exists():
    for folder in ("src", "tests", "deploy", "benchmarks", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml"):
                for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text()):
                    assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)} names {name}"


def package_of(path: Path) -> str:
    return path.relative_to(ROOT / "src/moorage").parts[0]


@pytest.mark.parametrize("package", sorted({package_of(path) for path in MODULES}))
def test_every_name_to_start_reading_at_exists(package):
    missing = [
        f"{path.relative_to(ROOT)}: `{name}` does not exist"
        for path in MODULES
        if package_of(path) == package
        for found in START.finditer(ast.get_docstring(ast.parse(path.read_text())) or "")
        for name in re.findall(r"`([\w./]+)(?:\(\))?`", found[1])
        if not exists(path, name)
    ]
    assert len(missing) <= STILL_MISSING.get(package, 0), "\n".join(missing)


def exists(path: Path, name: str) -> bool:
    """Whether a name in the docstring of a module is a file, or an attribute in it, below it or below moorage."""
    if "/" in name or name.endswith(".py"):
        return any((base / name).exists() for base in (path.parent, ROOT / "src/moorage", ROOT))
    module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    if path.name == "__main__.py":  # importing it would change this process, as a program may
        module = package
        if any(getattr(node, "name", "") == name for node in ast.parse(path.read_text()).body):
            return True
    return any(resolves(f"{base}.{name}".lstrip(".")) for base in (module, package, "moorage", ""))


def resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return all((found := _member(found, part)) is not None for part in parts[count:])
    return False


def _member(owner: object, name: str) -> object:
    """An attribute, or a field that only instances have."""
    if hasattr(owner, name):
        return getattr(owner, name)
    return True if name in getattr(owner, "__annotations__", {}) or _assigned(owner, name) else None


def _assigned(owner: object, name: str) -> bool:
    code = getattr(getattr(owner, "__init__", None), "__code__", None)
    return code is not None and name in code.co_names


def test_the_map_has_every_package_and_names_only_what_exists():
    page = (ROOT / "docs/contributing/map.md").read_text()
    packages = {path.parent.name for path in (ROOT / "src/moorage").glob("*/__init__.py")}
    packages_of_the_page = page.partition("Other folders")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", packages_of_the_page, re.M))
    assert set(rows) == packages
    for package, first in rows.items():
        for name in re.findall(r"`([\w./]+)`", first):
            assert (ROOT / "src/moorage" / package / name).is_file(), f"{package}: {name}"
    for name in re.findall(r"`((?:tests|deploy|scripts|benchmarks)/[\w./]+)`", page):
        assert (ROOT / name).exists(), name
