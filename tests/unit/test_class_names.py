"""A public class name means one thing in the whole source tree."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "moorage"
# The author of a driver knows volumes, snapshots and services as the SDK calls them, whatever Moorage is made of. The
# plugin and the scripted driver are such drivers.
OF_DRIVERS = ("sdk", "plugin", "testing")


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
