"""What the commands of `moorage volume` share: the pool, arguments, sizes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moorage import log
from moorage.cli import show
from moorage.cli.app import App, Verbose
from moorage.errors import UsageError
from moorage.storage import Pool, Volume
from moorage.storage.guests import open_pool

app = App()

Name = Annotated[str, typer.Argument(help="A volume: its name, id, or claim as NAMESPACE/CLAIM.")]
SnapshotName = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="A snapshot: its name or id.")]


@dataclass(frozen=True, slots=True)
class ChosenPool:
    """The pool that the commands work on."""

    directory: Path | None

    def open(self, make: bool = False) -> Pool:
        if self.directory is None:
            raise UsageError("which pool? Give `moorage volume --pool PATH …`, or set MOORAGE_POOL")
        return open_pool(self.directory, make=make)


@app.callback()
def volume(
    ctx: typer.Context,
    pool: Annotated[str, typer.Option(metavar="PATH", help="Directory of the pool.", envvar="MOORAGE_POOL")] = "",
    verbose: Verbose = False,
) -> None:
    """Work with the volumes of a pool, without any cluster; safe beside a running plugin.

    A volume is named by its name, its id, or its claim as NAMESPACE/CLAIM.

    Examples:

      moorage volume --pool /var/lib/moorage list

      moorage volume --pool /var/lib/moorage inspect shop/data
    """
    log.configure("info" if verbose else "warning")
    ctx.obj = ChosenPool(Path(pool) if pool else None)


def check_choice(option: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise UsageError(f"{option} {text!r}: want {', '.join(allowed)}")
    return text


def tell(volume: Volume, output: str, sentence: str) -> None:
    if show.check_output(output):
        show.json_out(volume)
    else:
        show.say(sentence)
