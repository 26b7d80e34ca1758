"""No text that a reader sees uses a word that the style guide replaces, and a class name has one meaning."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from scripts import words

# How many places of a folder are still to be rewritten; a number may only be lowered.
STILL_THERE = {
    "CONTRIBUTING.md": 1,
    "Makefile": 2,
    "docs": 83,
    "moorage/apiserver": 12,
    "moorage/cli": 5,
    "moorage/cluster": 3,
    "moorage/host": 20,
    "moorage/insight": 32,
    "moorage/node": 95,
    "moorage/storage": 26,
    "moorage/upkeep": 3,
}

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


def test_no_public_class_name_is_used_twice():
    found = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE)
        if name.parts[0] in OF_DRIVERS or "generated" in name.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(name))
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
