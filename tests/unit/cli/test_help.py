"""The help of every command: fits 80 columns, examples first, the same words for the same flags."""

import importlib
import json
import re
from itertools import pairwise

import pytest
import typer

from moorage.cli import app as cli_app
from moorage.cli import main

# A flag that means something else in another command, and so has other words there.
OF_THEIR_OWN = {
    "--kind": {"driver new"},
    "--name": {"volume manifest"},  # of the object, not of a volume
    "--node": {"volume manifest"},
    "--option": {"driver run"},  # of the driver, not of a mount
    "--skip": {"check"},
    "--verbose": {"check"},
    "--list": {"check"},
    "--driver": {"up", "volume manifest"},
    "--data-dir": {"apiserver"},
    "--endpoint": {"plugin"},  # serves it; the others call it
    "--kubeconfig": {"apiserver"},  # writes it
    "--pool": {"plugin", "gc", "up", "volume"},
    "--port": {"apiserver"},  # a text, so that nothing is converted
    "--output": {"volume list"},
    "--size": {"check", "volume create"},
    "--trash-retention": {"plugin", "gc"},
}


def commands():
    """Every command as its words and its object."""
    yield "", typer.main.get_command(main.app)
    for name, (module, _) in main.COMMANDS.items():
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name = name
        yield name, command
        yield from ((f"{name} {inner}", each) for inner, each in getattr(command, "commands", {}).items())


ALL = dict(commands())


def help_of(name, monkeypatch, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    command = ALL[name]
    with command.make_context(f"moorage {name}".strip(), [], resilient_parsing=True) as context:
        return cli_app.help_text(command, context)


def words(text):
    return set(re.findall(r"\S+", text))


@pytest.mark.parametrize("name", ALL)
def test_help_fits_80_columns_and_breaks_no_word(name, monkeypatch):
    narrow, wide = help_of(name, monkeypatch), help_of(name, monkeypatch, 100)
    assert [line for line in narrow.splitlines() if len(line) > 80] == []
    assert words(narrow) == words(wide)


@pytest.mark.parametrize("name", [name for name in ALL if name != "sidecars"])
def test_help_begins_with_a_sentence_and_examples(name, monkeypatch):
    text = help_of(name, monkeypatch)
    first, rest = text.split("\n\n", 1)
    assert first.endswith(".")
    assert rest.startswith("Examples:\n  ")
    assert f"moorage {name.split(' ')[0]}".strip() in rest.partition("\n\nUsage:")[0]
    titles = [title for title in ("Examples:", "Usage:", "Commands:", "Arguments:", "Options:") if f"\n{title}" in text]
    assert all(text.index(f"\n{one}") < text.index(f"\n{two}") for one, two in pairwise(titles))


def test_the_same_flag_has_the_same_words_everywhere():
    known = {}
    for name, command in ALL.items():
        for option in command.params:
            if cli_app.is_argument(option):
                continue
            told = (tuple(option.opts), option.help, cli_app.value_word(option))
            flag = max(option.opts, key=len)
            if name not in OF_THEIR_OWN.get(flag, ()):
                assert known.setdefault(flag, told) == told, f"moorage {name} {flag}"


def test_every_argument_and_option_says_what_it_is():
    for name, command in ALL.items():
        assert [each.name for each in command.params if not each.help and name != "sidecars"] == [], name


def test_completion_is_set_up_by_moorage_alone(monkeypatch):
    assert [name for name in ALL if "completion" in help_of(name, monkeypatch)] == [""]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["expplain"], "there is no command 'expplain'; did you mean 'explain'?"),
        (["frobnicate"], "there is no command 'frobnicate'; `moorage --help` lists all"),
        (["volume", "--pool", "/p", "lst"], "there is no command 'lst'; did you mean 'list'?"),
        (["gc", "--grac", "3"], "there is no option --grac; did you mean '--grace'? See `moorage gc --help`."),
        (["volume", "export"], "SOURCE is missing. See `moorage volume export --help`."),
        (["volume", "list"], "which pool? Give `moorage volume --pool PATH …`, or set MOORAGE_POOL"),
        (["csi", "CreatVolume"], "there is no CSI method 'CreatVolume'; did you mean 'CreateVolume'?"),
        (
            ["csi", "CreateVolume", "parameter.a=b"],
            "'parameter.a=b': CreateVolumeRequest has no field 'parameter'; did you mean 'parameters'?",
        ),
        (["check", "--endpoint", "unix:///x", "--size", "64 Mo"], "--size: '64 Mo' is not a quantity"),
        (["up", "--port", "99999"], "Invalid value for '--port': Input should be less than or equal to 65535."),
    ],
)
def test_what_is_wrong_with_a_line_is_said_in_one_sentence(line, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["moorage", *line])
    for as_json in (False, True):
        with pytest.raises(SystemExit) as ended:
            main.main([*line, "-o", "json"] if as_json and "up" not in line else line)
        assert ended.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in (err if not err.startswith("{") else json.loads(err)["error"]["message"])
        assert err.startswith("{") == (as_json and "up" not in line)


def test_help_of_a_command_of_a_pool_needs_no_pool(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["moorage", "volume", "export", "--help"])
    with pytest.raises(SystemExit) as ended:
        main.main(["volume", "export", "--help"])
    assert ended.value.code == 0
    assert "moorage volume --pool /srv/pool export db /backup/db.mx" in capsys.readouterr().out
