"""The `moorage` command: names every command and loads only the one that was asked for.

Owns: the table of commands, `--version`, logging flags, and turning a MoorageError into a sentence and an exit code.
Each command lives in `moorage.cli.<module>` as a Typer app called `app`: a single command or a group.
The plugin's process must stay small, so nothing here imports a component.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from moorage import __version__, log
from moorage.cli import extras, show
from moorage.cli.app import App, Command, CommandGroup, argument_name, is_argument
from moorage.cli.lazy_typer import without_adapters
from moorage.errors import MoorageError
from moorage.suggest import did_you_mean

_HELP = """Persistent volumes for containers: the Kubernetes storage stack, on a cluster or on one machine.

Examples:

  moorage demo                     a volume's life, shown and checked

  moorage up --data-dir /tmp/moor  a small cluster to play with

  moorage explain pod/web          why it is where it is, on any cluster
"""

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("moorage.cli.up", "Run the whole stack on this machine; stay in the foreground."),
    "demo": ("moorage.cli.demo", "Walk one volume through its life, show and check each step."),
    "plugin": ("moorage.cli.plugin", "Run the CSI plugin."),
    "sidecars": ("moorage.cli.sidecars", "Run the sidecars that a CSI driver needs, in one process."),
    "controllers": ("moorage.cli.controllers", "Run the cluster-side controllers."),
    "node": ("moorage.cli.node", "Run the node agent."),
    "apiserver": ("moorage.cli.apiserver", "Run the embedded API server alone."),
    "driver": ("moorage.cli.driver", "Write a CSI driver in Python: a new project, and the loop of edit and run."),
    "check": ("moorage.cli.check", "Check any CSI driver against the contract."),
    "explain": ("moorage.cli.explain", "Say why an object is where it is, and what to do."),
    "trace": ("moorage.cli.trace", "Tell what happened to an object, and where the time went."),
    "ui": ("moorage.cli.ui", "Serve a live page for volumes: where each is, what is stuck and why."),
    "csi": ("moorage.cli.csi", "Make one CSI call, by hand, to any driver."),
    "volume": ("moorage.cli.volume", "Work with volumes without any cluster."),
    "gc": ("moorage.cli.gc", "Find what no one owns any more, and say why."),
}


class LazyGroup(CommandGroup):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if self._exists(name)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS or not self._exists(cmd_name):
            return None
        module, summary = COMMANDS[cmd_name]
        if not _is_wanted(cmd_name):
            return Command(cmd_name, short_help=summary, help=summary)
        extras.require(cmd_name)
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name = cmd_name
        command.short_help = summary
        return command

    @staticmethod
    def _exists(name: str) -> bool:
        return importlib.util.find_spec(COMMANDS[name][0]) is not None


def _is_wanted(name: str) -> bool:
    """Whether a command is to be run, or completed; in a list of commands its summary will do."""
    if "_MOORAGE_COMPLETE" in os.environ:
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        return name in line.split()[1:]
    return name in sys.argv[1:]


app = App(
    cls=LazyGroup,
    help=_HELP,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        show.say(f"moorage {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.", envvar="MOORAGE_LOG_LEVEL")
    ] = "info",
    log_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="text or json.", envvar="MOORAGE_LOG_FORMAT")
    ] = "text",
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that go before the command's name."""
    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter("must be debug, info, warning or error", param_hint="--log-level")
    if log_format not in ("text", "json"):
        raise typer.BadParameter("must be text or json", param_hint="--log-format")
    log.configure(log_level, log_format)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 is success, 1 is failure, 2 is usage."""
    without_adapters()
    words = sys.argv[1:] if argv is None else argv
    try:
        code = app(words or ["--help"], prog_name="moorage", standalone_mode=False)
    except MoorageError as error:
        _tell(str(error), error.code, words)
        code = 1 if error.retryable or error.code != "INVALID_ARGUMENT" else 2
    except TyperException as error:
        _tell(_usage_message(error), "INVALID_ARGUMENT", words)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception:
        show.traceback_out(traceback.format_exc())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _tell(message: str, code: str, words: Sequence[str]) -> None:
    """Write one sentence to stderr, or a JSON object if the command was to print JSON."""
    if _wants_json(words):
        show.json_out({"error": {"code": code, "message": message}}, err=True)
    else:
        show.say(f"Error: {message}", err=True)


def _wants_json(words: Sequence[str]) -> bool:
    pairs = zip(words, [*words[1:], ""], strict=True)
    return any(
        one in ("-ojson", "--output=json") or (one in ("-o", "--output") and two == "json") for one, two in pairs
    )


def _usage_message(error: TyperException) -> str:
    """Return what is wrong with the words, and where their help is."""
    text = error.format_message().rstrip(".")
    if unknown := getattr(error, "option_name", ""):
        text = f"there is no option {unknown}{did_you_mean(unknown, getattr(error, 'possibilities', None) or ())}"
    parameter = getattr(error, "param", None)
    if parameter is not None and text.startswith("Missing"):
        text = f"{argument_name(parameter) if is_argument(parameter) else max(parameter.opts, key=len)} is missing"
    context = getattr(error, "ctx", None)
    return f"{text}{'' if text.endswith('?') else '.'} See `{context.command_path} --help`." if context else text


if __name__ == "__main__":
    main()
