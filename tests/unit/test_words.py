"""No text that a reader sees uses a word that the style guide replaces, and a class name has one meaning."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from scripts import words

from moorage.kube import names

# How many places of a folder are still to be rewritten; a number may only be lowered.
STILL_THERE = {}

SOURCE = words.ROOT / "src" / "moorage"
# The author of a driver knows volumes, snapshots and services as the SDK calls them, whatever Moorage is made of. The
# plugin and the scripted driver are such drivers.
OF_DRIVERS = ("sdk", "plugin", "testing")


def folder_of(path: Path) -> str:
    parts = path.relative_to(words.ROOT).parts
    return "/".join(parts[1:3]) if parts[0] == "src" else parts[0]


def test_only_the_allowed_number_of_forbidden_words_is_left():
    found: dict[str, list[str]] = defaultdict(list)
    for path in words.files():
        for line, word in words.places_in(path):
            found[folder_of(path)].append(f"{path.relative_to(words.ROOT)}:{line}: {word}")
    more = {folder: places for folder, places in found.items() if len(places) > STILL_THERE.get(folder, 0)}
    assert not more, "\n".join(place for places in more.values() for place in places)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Somebody else wrote.\n", [(1, "somebody")]),
        ("fine\nit is\ntold here", [(2, "is told")]),
        ('the user "nobody"', []),
        ("a word offset, of users, renew, let gold", []),
    ],
)
def test_words_are_found_across_lines_and_not_inside_others(tmp_path, monkeypatch, text, found):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text)
    assert list(words.places_in(tmp_path / "page.md")) == found


@cache
def modules() -> dict[Path, ast.Module]:
    """The source tree, parsed, without generated code and without drivers."""
    found = (path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
    wanted = (name for name in found if name.parts[0] not in OF_DRIVERS and "generated" not in name.parts)
    return {name: ast.parse((SOURCE / name).read_text()) for name in wanted}


def test_no_public_class_name_is_used_twice():
    found = defaultdict(list)
    for name, module in modules().items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(name))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_every_name_shared_with_kubernetes_is_spelled_once():
    """Prefixes, which end in a slash, are parts of other names too."""
    values = (value for name, value in vars(names).items() if name.isupper() and isinstance(value, str))
    shared = {value for value in values if "/" in value and not value.endswith("/")}
    spelled = [
        f"{name}:{node.lineno}: {node.value}"
        for name, module in modules().items()
        if name not in (Path("kube/names.py"), Path("csi/redact.py")) and name.parts[0] != "conformance"
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and node.value in shared
    ]
    assert spelled == []
