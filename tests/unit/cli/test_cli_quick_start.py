"""Small commands start quickly, and mean the same as before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "moorage.cli.main", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_a_small_command_does_not_load_pydantic(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom moorage.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 1, end.code\n"
        "print([name for name in sys.modules if name.startswith('pydantic')])"
    )
    argv = [sys.executable, "-c", code, "volume", "--pool", str(tmp_path / "none"), "list", "-o", "json"]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "[]", ran.stderr
    assert "there is no pool" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "a", "b", "--skip", "x"], "valid integer"),
        (["export", "a", "b", "--skip", "-1"], "greater than or equal to 0"),
        (["export", "a"], "FILE is missing"),
        (["list", "--no-such"], "there is no option --no-such"),
    ],
)
def test_bad_values_get_the_usual_sentence_and_exit_code_2(arguments: list[str], said: str, tmp_path: Path) -> None:
    ran = _run("volume", "--pool", str(tmp_path), *arguments)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_values_of_the_environment_are_converted(tmp_path: Path) -> None:
    ran = _run("volume", "list", MOORAGE_POOL=str(tmp_path / "from-the-environment"))
    assert ran.returncode == 1
    assert "from-the-environment" in ran.stderr
