"""Each line of the threat model names a test that exists, and each file of attacks has a line."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "explanation" / "threat-model.md"
_NAMED = re.compile(r"`(\w+/[\w/]+\.py)::(\w+)`")


def rows():
    """Return the lines of the tables whose last column is `test`."""
    found, inside = [], False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[-1] == "test":
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            found.append((line, _NAMED.findall(cells[-1])))
    return found


def names_of_tests(path):
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_each_row_names_a_test_that_exists():
    assert rows()
    wrong = [
        line
        for line, named in rows()
        if not named
        or any(not (TESTS / file).is_file() or name not in names_of_tests(TESTS / file) for file, name in named)
    ]
    assert not wrong, "\n".join(wrong)


def test_each_file_of_attacks_has_a_row():
    named = {file for _, tests in rows() for file, _ in tests}
    files = {f"security/{path.name}" for path in (TESTS / "security").glob("test_*.py")}
    assert files - named == set()
