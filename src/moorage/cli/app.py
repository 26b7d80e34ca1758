"""The shape of every command: how its help looks, and the flags that several commands share.

Owns: the layout of `--help`: what the command does, examples, usage, arguments, options, with no word broken. The words
that stand for values, and the flags whose meaning is the same in each command that has them.
Start reading at: `App`, `help_text`.
"""

import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from moorage.errors import UsageError
from moorage.suggest import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

_WIDEST = 100
_NAMES_WIDTH = 28
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_WORDS = {"Path": "PATH", "int": "NUMBER", "float": "NUMBER"}
_COMPLETION = ("install_completion", "show_completion")

Output = Annotated[str, typer.Option("-o", "--output", metavar="FORMAT", help="text or json.")]
WideOutput = Annotated[str, typer.Option("-o", "--output", metavar="FORMAT", help="text, wide or json.")]
Kubeconfig = Annotated[
    str,
    typer.Option(metavar="FILE", help="How to reach the cluster. Otherwise KUBECONFIG, or the account of the pod."),
]
Namespace = Annotated[str, typer.Option("-n", "--namespace", metavar="NAME", help="Namespace of the object.")]
SecretsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="JSON object with the secrets to send; never printed.")
]
CallTimeout = Annotated[float, typer.Option(metavar="SECONDS", help="Deadline of each call.", min=0.1)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also show what is logged.")]
Endpoint = Annotated[
    str, typer.Option(metavar="ADDRESS", help="The driver's socket, as unix:///path/csi.sock.", envvar="CSI_ENDPOINT")
]
Port = Annotated[int, typer.Option(help="The port to serve on; 0 takes a free one.", min=0, max=65535)]


class App(typer.Typer):
    """A command or a group of commands with our help. Completion belongs to `moorage` itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"cls": CommandGroup, "add_completion": False, "rich_markup_mode": None, **settings})

    def command(self, *words: Any, **settings: Any) -> Callable[[F], F]:
        return super().command(*words, **{"cls": Command, **settings})


class Command(TyperCommand):
    """One command."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx))


class CommandGroup(TyperGroup):
    """Several commands under one name."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name and name[0] != "-" and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            meant = did_you_mean(name, self.list_commands(ctx))
            raise UsageError(f"there is no command {name!r}{meant or f'; `{ctx.command_path} --help` lists all'}")
        return super().resolve_command(ctx, args)


def help_text(command: Any, ctx: Any) -> str:
    """Return what `--help` shows, as wide as the terminal is, from 40 to 100 columns."""
    width = min(max(shutil.get_terminal_size().columns, 40), _WIDEST)
    first, examples, rest = parts_of(command.help or "")
    blocks = [_filled(first, width)]
    if examples:
        blocks.append("\n".join(["Examples:", *(textwrap.indent(example, "  ") for example in examples)]))
    blocks.append(_filled(f"Usage: {usage_of(command, ctx.command_path)}", width))
    blocks += [_filled(paragraph, width) for paragraph in rest]
    arguments = [(argument_name(each), each.help or "") for each in command.params if is_argument(each)]
    options = [(option_names(each), about_option(each)) for each in command.get_params(ctx) if is_shown_option(each)]
    names = command.list_commands(ctx) if isinstance(command, TyperGroup) else []
    commands = [(name, command.get_command(ctx, name).get_short_help_str(200)) for name in names]
    for title, rows in (("Commands", commands), ("Arguments", arguments), ("Options", options)):
        if rows:
            blocks.append("\n".join([f"{title}:", *_rows(rows, width)]))
    return "\n\n".join(blocks) + "\n"


def parts_of(text: str) -> tuple[str, list[str], list[str]]:
    """Return the first paragraph of a help text, its examples, and its other paragraphs.

    Examples are the indented paragraphs. Line breaks are kept in them, and in paragraphs that begin with a backspace,
    as click has it.
    """
    first, *others = [paragraph.rstrip() for paragraph in text.strip().split("\n\n")]
    examples = [textwrap.dedent(each).rstrip() for each in others if each.startswith("  ")]
    rest = [each for each in others if not each.startswith("  ") and each.strip() != "Examples:"]
    return first, examples, [each for each in rest if each.strip("\b\n ")]


def usage_of(command: Any, path: str) -> str:
    words = [path, "[OPTION]..."]
    words += ["COMMAND"] if isinstance(command, TyperGroup) else [argument_usage(each) for each in _arguments(command)]
    return " ".join(words)


def argument_name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def argument_usage(argument: Any) -> str:
    if argument.metavar and "[" in argument.metavar:
        return str(argument.metavar)
    name = argument_name(argument) + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def option_names(option: Any) -> str:
    names = ", ".join((*option.opts, *option.secondary_opts))
    return names if option.is_flag else f"{names} {value_word(option)}"


def value_word(option: Any) -> str:
    """Return the word that stands for an option's value."""
    if option.metavar:
        return str(option.metavar)
    kind = str(option.type_descriptor.annotation)
    return next((word for part, word in _WORDS.items() if part in kind), "TEXT")


def default_of(option: Any) -> str:
    """Return a default as a person would type it; empty if there is none to show."""
    value = option.default
    if option.required or callable(value) or value is None or value is False or value in ("", (), []):
        return ""
    if value is True:
        return "on"
    return f"{value:g}" if isinstance(value, float) else str(value)


def about_option(option: Any) -> str:
    """Return an option's help, with its default and its environment variable."""
    facts = ["required"] if option.required else []
    if default_of(option):
        facts.append(f"default: {default_of(option)}")
    if option.multiple:
        facts.append("may be repeated")
    if option.envvar:
        facts.append(f"environment: {option.envvar}")
    return f"{option.help or ''} [{'; '.join(facts)}]".strip() if facts else option.help or ""


def is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def is_shown_option(parameter: Any) -> bool:
    return not is_argument(parameter) and not parameter.hidden


def is_completion(parameter: Any) -> bool:
    return parameter.name in _COMPLETION


def _arguments(command: Any) -> list[Any]:
    return [each for each in command.params if is_argument(each)]


def _rows(rows: list[tuple[str, str]], width: int) -> list[str]:
    """Two columns; a name that is too long for its column has a line of its own."""
    left = min(max(len(name) for name, _ in rows), _NAMES_WIDTH) + 4
    lines: list[str] = []
    for name, about in rows:
        told = textwrap.wrap(about, width - left, **_WHOLE_WORDS) or [""]
        if len(name) > left - 4:
            lines.append(f"  {name}")
            lines += [" " * left + line for line in told]
        else:
            lines.append(f"  {name:<{left - 4}}  {told[0]}".rstrip())
            lines += [" " * left + line for line in told[1:]]
    return lines


def _filled(text: str, width: int) -> str:
    if text.startswith("\b"):
        lines = text.removeprefix("\b").strip("\n").split("\n")
        return "\n".join(textwrap.fill(each, width, subsequent_indent="    ", **_WHOLE_WORDS) for each in lines)
    return textwrap.fill(" ".join(text.split()), width, **_WHOLE_WORDS)
