"""The command line's manners: help, version, completion, errors as sentences, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def moorage(*words: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("moorage")), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    return done.returncode, done.stdout, done.stderr


def completed(line: str) -> list[str]:
    words = {"_TYPER_COMPLETE_ARGS": line, "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    return moorage(_MOORAGE_COMPLETE="complete_bash", **words)[1].split()


def test_help_names_every_command_and_imports_none():
    code, out, _ = moorage("--help")
    assert code == 0
    for name in ("up", "demo", "plugin", "sidecars", "controllers", "node", "apiserver", "check", "explain", "csi"):
        assert name in out


@pytest.mark.parametrize("name", ["up", "explain", "csi", "check"])
def test_help_of_a_command_shows_an_example(name):
    code, out, _ = moorage(name, "--help")
    assert code == 0
    assert f"moorage {name}" in out.split("Example")[1]


def test_version():
    assert moorage("--version")[:2] == (0, "moorage 0.1.0\n")


def test_what_is_wrong_with_the_words_is_a_sentence_and_code_2():
    for words in (
        ("nosuch",),
        ("csi", "NoSuchMethod"),
        ("explain", "nonsense"),
        ("--log-level", "loud", "csi", "--list"),
    ):
        code, _, err = moorage(*words, KUBECONFIG="/no/such/file")
        assert code == 2, words
        assert err.strip()
        assert "Traceback" not in err


def test_a_driver_or_server_that_does_not_answer_is_a_sentence_and_code_1(tmp_path):
    code, _, err = moorage("csi", "Probe", "--endpoint", f"unix://{tmp_path}/none.sock", "--timeout-s", "2")
    assert code == 1
    assert "none.sock" in err
    assert "Traceback" not in err


def test_completion_knows_commands_options_methods_and_fields():
    assert "explain" in completed("moorage ex")
    assert "--nodes" in completed("moorage up --no")
    assert "NodeStageVolume" in completed("moorage csi NodeSt")
    assert "volume_id=" in completed("moorage csi DeleteVolume vol")


def test_without_a_terminal_there_are_no_colours():
    assert "\x1b[" not in moorage("csi", "--list")[1]
