"""`moorage explain`: why an object is where it is, and what to do."""

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from moorage import log
from moorage.cli import show
from moorage.cli.app import App, Kubeconfig, Namespace, Output
from moorage.errors import MoorageError, UsageError
from moorage.insight.explain import ObjectNotFound, Story, explain_all
from moorage.insight.explain import explain as explain_one
from moorage.insight.watcher import Follower
from moorage.kube.api import config
from moorage.kube.api.client import TRIES, TRIES_FOR_A_PERSON, Client
from moorage.storage.guests import open_pool
from moorage.suggest import command

app = App()


@app.command()
def explain(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="[OBJECT]",
            help="pvc/NAME, pod/NAME, pv/NAME, va/NAME, snapshot/NAME or node/NAME. Without one: all that is stuck.",
        ),
    ] = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Explain again at each change, until nothing is wrong.")
    ] = False,
    output: Output = "text",
) -> None:
    """Say why a claim, pod, volume, attachment, snapshot or node is where it is, and what to do.

    Examples:

      moorage explain                   everything that is stuck

      moorage explain pvc/data -n shop  one claim
    """
    show.check_output(output)
    if watch and not reference:
        raise UsageError("--watch needs an object, such as pvc/data")
    try:
        asyncio.run(_explain(reference, namespace, kubeconfig, watch, output))
    except ObjectNotFound as error:
        kept = _kept(error.trashed_as, kubeconfig)
        raise ObjectNotFound(error.message + kept) if kept else error from None


def _kept(name: str, kubeconfig: str) -> str:
    """Say that the trash of the pool at hand has a volume: of MOORAGE_POOL, or `pool` beside the kubeconfig."""
    known = kubeconfig or os.environ.get("KUBECONFIG", "")
    directory = os.environ.get("MOORAGE_POOL", "") or (str(Path(known).parent / "pool") if known else "")
    if not name or not directory:
        return ""
    log.configure("warning")
    try:
        with open_pool(Path(directory)) as pool:
            left = [item.expires_ns for item in pool.trash.listed() if name in (item.claim, item.name)]
    except MoorageError:  # no pool, or one that this account may not open: the error says where to look
        return ""
    undelete = command("moorage", "volume", f"--pool={directory}", "undelete", names=(name,))
    hours = show.age(max(0.0, max(left, default=0) / 1e9 - time.time()))
    return f"; its data is kept in the trash for {hours}: `{undelete}`" if left else ""


async def _explain(reference: str, namespace: str, kubeconfig: str, watch: bool, output: str) -> None:
    tries = TRIES if watch else TRIES_FOR_A_PERSON
    async with Client(config.load(kubeconfig or None), identity="moorage-explain", tries=tries) as client:
        if not reference:
            _print_all(await explain_all(client), output)
            return
        shown, where = "", namespace or client.namespace
        async with Follower(client, where) as follower:
            while True:
                story = await explain_one(client, reference, where)
                if story.sentence != shown:
                    _print(story, output)
                    shown = story.sentence
                if not watch or not story.stuck:
                    return
                await follower.next(story)


def _print_all(stories: list[Story], output: str) -> None:
    if show.check_output(output):
        show.json_out(stories)
        return
    if not stories:
        show.say("Nothing is stuck.")
    for story in stories:
        show.paragraph(story.sentence, hang="  ")
        if story.next_step:
            show.command(f"    → {story.next_step}")


def _print(story: Story, output: str) -> None:
    if show.check_output(output):
        show.json_out(story)
        return
    show.paragraph(story.sentence, style="bold")
    if len(story.chain) > 1:
        show.heading("The chain:")
        for depth, link in enumerate(story.chain):
            show.paragraph(f"{link.object} [{link.state}]: {link.sentence}", indent="   " * depth + "  ", hang="  ")
    if story.evidence:
        show.heading("Evidence:")
        for line in story.evidence:
            show.paragraph(line, indent="  ", hang="  ")
    if story.next_step:
        show.heading("Next step:", style="green")
        _print_step(story.next_step, story.purpose)
    for at, later in enumerate(story.then, 1):
        show.say(f"Then ({at} of {len(story.then)}):", style="green")
        _print_step(later.command, later.purpose, later.harm)
    for kind, why in story.unreadable.items():
        show.paragraph(f"(could not read {kind}: {why})", style="dim", hang="  ")


def _print_step(step: str, purpose: str, harm: str = "") -> None:
    """Write one step, with what it is for as a comment above it; a step that ends or destroys something is marked."""
    if harm:
        show.paragraph(f"# DESTRUCTIVE: {harm}", style="red", indent="  ", hang="# ")
    if purpose:
        show.paragraph(f"# {purpose}", style="dim", indent="  ", hang="# ")
    show.command(f"  {step}")
