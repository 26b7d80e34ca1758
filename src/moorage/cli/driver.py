"""`moorage driver`: write a CSI driver in Python: a new project, and the loop of edit, run and check."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moorage import log
from moorage.authoring.project import KINDS, SIDECARS, Project, write
from moorage.cli import extras, show
from moorage.cli.app import App, Output
from moorage.host.safe_remove import temporary_directory
from moorage.process import stop_event

if TYPE_CHECKING:
    from moorage.authoring.loop import LoopSettings

app = App(no_args_is_help=True)


@app.callback()
def driver() -> None:
    """Write a CSI driver in Python: a new project, and the loop of edit, run and check.

    Examples:

      moorage driver new my-disks --kind block

      moorage driver run my-disks/driver.py
    """


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the driver, of a-z, 0-9 and -.")],
    kind: Annotated[str, typer.Option(help=f"What a volume is: {', '.join(KINDS)}.")] = "directory",
    domain: Annotated[str, typer.Option(help="Your domain. The driver is called NAME.DOMAIN.")] = "example.org",
    sidecars: Annotated[str, typer.Option(help=f"Of the manifests: {' or '.join(SIDECARS)}.")] = "moorage",
    directory: Annotated[Path | None, typer.Option(help="Where to write it. Otherwise NAME.")] = None,
    output: Output = "text",
) -> None:
    """Write a project with a CSI driver that works: tests, image, manifests, pipeline.

    Examples:

      moorage driver new my-files

      moorage driver new my-disks --kind block --sidecars official
    """
    as_json = show.check_output(output)
    place = directory or Path(name)
    written = write(Project(name, kind, domain, sidecars), place)
    if as_json:
        show.json_out({"directory": place, "files": written})
        return
    for path in written:
        show.say(f"  {path}")
    show.heading("Try it, as root:")
    show.command(f"moorage driver run {place / 'driver.py'}")
    show.command(f"cd {place} && python -m pytest")


@app.command()
def run(
    script: Annotated[Path, typer.Argument(help="The driver, a Python file.")],
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the driver.")] = None,
    check_flag: Annotated[list[str] | None, typer.Option(metavar="FLAG", help="Flag of `moorage check`.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Directory for the state of cluster and driver. Otherwise a temporary one.")
    ] = None,
    cluster: Annotated[bool, typer.Option(help="Run a cluster of its own around the driver.")] = True,
    all_calls: Annotated[bool, typer.Option("--all-calls", help="Show also calls that are made all the time.")] = False,
) -> None:
    """Run a driver under a cluster of its own, restart it when its file is saved, and watch its calls.

    Each call is a line: who made it, its code, its seconds. A line in red says where the driver breaks the contract.
    Keys: c runs `moorage check` on the driver, r restarts it, q ends.

    Examples:

      moorage driver run ./driver.py

      moorage driver run ./driver.py --option root=/mnt --check-flag=--block
    """
    extras.require("driver run")
    from moorage.authoring.loop import LoopSettings  # loads a whole cluster

    with contextlib.ExitStack() as stack:
        place = state or stack.enter_context(temporary_directory("moorage-driver-"))
        settings = LoopSettings(
            script.absolute(),
            place.absolute(),
            option or (),
            check_flag or (),
            has_cluster=cluster,
            shows_all=all_calls,
        )
        log.configure("warning")
        asyncio.run(_run(settings))


async def _run(settings: "LoopSettings") -> None:
    from moorage.authoring.loop import DriverLoop  # loads a whole cluster

    loop = DriverLoop(settings, lambda text, style: show.say(text, style=style), stop_event())
    with _keys(loop.press):
        await loop.run()


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Read single keys of a terminal, or the characters of a pipe, for the length of the block."""
    descriptor, running = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor) if os.isatty(descriptor) else None

    def read() -> None:
        keys = os.read(descriptor, 64).decode(errors="ignore")
        if not keys:
            running.remove_reader(descriptor)
        for key in keys:
            press(key)

    try:
        if before is not None:
            tty.setcbreak(descriptor)
        with contextlib.suppress(PermissionError):  # a regular file, such as /dev/null, has no events
            running.add_reader(descriptor, read)
        yield
    finally:
        running.remove_reader(descriptor)
        if before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
