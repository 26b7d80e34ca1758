"""`moorage demo`: one volume through its life, on a cluster that is gone afterwards."""

import asyncio
import time
from typing import Annotated

import typer
import uvloop

from moorage import log
from moorage.cli import show
from moorage.cli.app import App, Output
from moorage.cluster.demo import Demo, DemoStep
from moorage.process import cancel_all, stop_event

app = App()


@app.command()
def demo(
    brief: Annotated[bool, typer.Option("--brief", help="Show only the steps, not who did what in each.")] = False,
    output: Output = "text",
) -> None:
    """Bring the stack up on this machine, walk one volume through its life, check each step, leave nothing behind.

    Examples:

      moorage demo

      moorage demo --brief
    """
    as_json = show.check_output(output)
    log.configure("error")
    steps, began = [], time.monotonic()

    def on_step(step: DemoStep) -> None:
        steps.append(step)
        if not as_json:
            _print(step, brief)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(_play(Demo(on_step))):
            show.say("Interrupted. Everything that the demo made is gone.", err=True)
            raise typer.Exit(130)
    if as_json:
        show.json_out(steps)
    else:
        show.say()
        show.say(("green", f"All {len(steps)} steps did what they promised"), f", in {time.monotonic() - began:.1f} s.")


async def _play(story: Demo) -> bool:
    """Play the demo. Returns whether it came to its end; a signal stops it, and it cleans up behind itself."""
    stop = stop_event()
    playing = asyncio.create_task(story.play(), name="demo")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((playing, stopping), return_when=asyncio.FIRST_COMPLETED)
    if playing.done():
        await cancel_all([stopping])
        await playing
        return True
    show.say("Stopping: everything that the demo made is removed. Ctrl-C again kills its pods …", err=True)
    playing.cancel()
    hurrying = asyncio.create_task(stop.hurry.wait(), name="hurry")
    await asyncio.wait((playing, hurrying), return_when=asyncio.FIRST_COMPLETED)
    if not playing.done():
        story.cluster.supervisor.hurry()
        await asyncio.wait([playing])
    await cancel_all([hurrying])
    if not playing.cancelled():
        await playing
    return False


def _print(step: DemoStep, brief: bool) -> None:
    show.say(("bold", step.title), ("dim", f" {step.seconds:.2f} s"))
    if not brief:
        for moment in step.moments:
            took = f" ({moment.seconds * 1000:.0f} ms)" if moment.seconds else ""
            after = max(0.0, moment.at - step.began) * 1000
            show.say(f"  {after:6.0f} ms  {moment.who:<14} {moment.what}{took}")
    show.say("  ", ("green", "✓"), f" {step.checked}")
