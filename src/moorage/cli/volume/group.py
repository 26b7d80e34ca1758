"""What the commands of `moorage volume` share: the pool, arguments, sizes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moorage import log
from moorage.cli import show
from moorage.errors import UsageError
from moorage.kube.quantity import bytes_of
from moorage.storage import Pool, Volume
from moorage.storage.guests import open_pool

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A volume, by name or id.")]
SnapshotName = Annotated[str, typer.Argument(help="A snapshot, by name or id.")]


@dataclass(frozen=True, slots=True)
class Place:
    """The pool that the commands work on."""

    directory: Path

    def open(self, make: bool = False) -> Pool:
        return open_pool(self.directory, make=make)


@app.callback()
def volume(
    ctx: typer.Context,
    pool: Annotated[str, typer.Option(help="Directory of the pool.", envvar="MOORAGE_POOL", metavar="DIRECTORY")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the pool logs.")] = False,
) -> None:
    """Work with the volumes of a pool, without any cluster; safe beside a running plugin.

    Example: moorage volume --pool /var/lib/moorage/pool list
    """
    log.configure("info" if verbose else "warning")
    ctx.obj = Place(Path(pool))


def bytes_from(option: str, text: str) -> int:
    """A size such as 10Gi; nothing is 0, which leaves it to the pool."""
    found = bytes_of(text)
    if text and found <= 0:
        raise UsageError(f"{option} {text!r}: a size must be more than nothing")
    return found


def check_choice(option: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise UsageError(f"{option} {text!r}: want {', '.join(allowed)}")
    return text


def tell(volume: Volume, output: str, sentence: str) -> None:
    if show.check_output(output):
        show.json_out(volume)
    else:
        show.say(sentence)
