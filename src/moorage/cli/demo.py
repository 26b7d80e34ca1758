"""`moorage demo`: one volume through its life, on a cluster that is gone afterwards."""

import asyncio
import json
import signal
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from moorage import log
from moorage.cluster.demo import Demo, DemoStep
from moorage.errors import UsageError

app = typer.Typer()


@app.command()
def demo(
    brief: Annotated[bool, typer.Option("--brief", help="Only the steps, not who did what in each.")] = False,
    output: Annotated[str, typer.Option("-o", "--output", help="text or json.")] = "text",
) -> None:
    """Bring the stack up on this machine, walk one volume through its life, check each step, leave nothing behind."""
    if output not in ("text", "json"):
        raise UsageError(f"--output {output!r}: want text or json")
    log.configure("error")
    console, steps, began = Console(highlight=False, soft_wrap=True), [], time.monotonic()

    def show(step: DemoStep) -> None:
        steps.append(step)
        if output == "text":
            _print(console, step, brief)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_play(show))
    if output == "json":
        sys.stdout.write(json.dumps([asdict(step) for step in steps], indent=2) + "\n")
    else:
        console.print(
            f"\n[bold green]All {len(steps)} steps did what they promised[/], in {time.monotonic() - began:.1f} s."
        )


async def _play(show: object) -> None:
    playing = asyncio.ensure_future(Demo(show).play())  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, playing.cancel)
    await playing


def _print(console: Console, step: DemoStep, brief: bool) -> None:
    console.print(f"[bold]{step.title}[/] [dim]{step.seconds:.2f} s[/]")
    if not brief:
        for moment in step.moments:
            took = f" ({moment.seconds * 1000:.0f} ms)" if moment.seconds else ""
            after = max(0.0, moment.at - step.began) * 1000
            console.print(f"  {after:6.0f} ms  {moment.who:<14} {moment.what}{took}", markup=False)
    console.print(f"  [green]✓[/] {step.checked}")
