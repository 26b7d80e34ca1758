"""A quick start for commands: values that need no conversion are not converted.

Owns: the step before Typer's conversion of parameters. Typer builds a pydantic adapter for every parameter of a command
before the command runs, given or not, and loading pydantic takes a third of the time in which a small command is done.
Strings, flags and defaults are right as they are; anything else goes the usual way, with the usual errors.
May not touch: what a parameter means. Where Typer converts elsewhere, nothing changes but the time.
Start reading at: `without_adapters`.
"""

from collections.abc import Callable
from typing import Any

from typer.core import TyperArgument, TyperOption

_PLAIN: tuple[type, ...] = (str, bool, int, float)
_METHOD = "get_runtime_param"


class _Reluctant:
    """Typer's conversion of one parameter, made when a value comes that needs it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        wanted = param.type_descriptor
        if type(value) is wanted.annotation and wanted.annotation in _PLAIN and wanted.parameter_info.parser is None:
            return value
        return self._make().coerce(value, param=param, ctx=ctx)


def without_adapters() -> None:
    """From now on, plain values pass as they are; calling it twice is calling it once."""
    for kind in (TyperOption, TyperArgument):
        usual = getattr(kind, _METHOD, None)
        if usual is not None and _METHOD not in vars(kind):
            setattr(kind, _METHOD, _hesitating(usual))


def _hesitating(usual: Callable[[Any], Any]) -> Callable[[Any], _Reluctant]:
    return lambda param: _Reluctant(lambda: usual(param))
