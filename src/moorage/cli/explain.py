"""`moorage explain`: why an object is where it is, and what to do."""

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from moorage.errors import UsageError
from moorage.insight.explain import Story, explain_all
from moorage.insight.explain import explain as explain_one
from moorage.insight.watcher import Follower
from moorage.kube.api import config
from moorage.kube.api.client import TRIES, TRIES_FOR_A_PERSON, Client

app = typer.Typer()


@app.command()
def explain(
    reference: Annotated[
        str, typer.Argument(help="pvc/NAME, pod/, pv/, va/, snapshot/ or node/; none: all that is stuck.")
    ] = "",
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Namespace of the object.")] = "",
    kubeconfig: Annotated[
        str, typer.Option(help="A kubeconfig; otherwise KUBECONFIG, or the account of the pod.")
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Tell again at each change, until nothing is wrong.")
    ] = False,
    output: Annotated[str, typer.Option("-o", "--output", help="text or json.")] = "text",
) -> None:
    """Say why a claim, pod, volume, attachment, snapshot or node is where it is, and what to do.

    Examples:

      moorage explain                     everything that is stuck

      moorage explain pvc/data -n shop    one claim
    """
    if output not in ("text", "json"):
        raise UsageError(f"--output {output!r}: want text or json")
    if watch and not reference:
        raise UsageError("--watch needs an object, such as pvc/data")
    asyncio.run(_explain(reference, namespace, kubeconfig, watch, output))


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
    if output == "json":
        sys.stdout.write(json.dumps([asdict(story) for story in stories], indent=2) + "\n")
        return
    console = Console(highlight=False, soft_wrap=True)
    if not stories:
        console.print("Nothing is stuck.")
    for story in stories:
        console.print(story.sentence, markup=False)
        if story.next_step:
            console.print(f"    → {story.next_step}", style="green", markup=False)


def _print(story: Story, output: str) -> None:
    if output == "json":
        sys.stdout.write(json.dumps(asdict(story), indent=2) + "\n")
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(story.sentence, style="bold", markup=False)
    if len(story.chain) > 1:
        console.print("\nThe chain:")
        for depth, link in enumerate(story.chain):
            console.print(f"{'   ' * depth}  {link.object} [{link.state}]: {link.sentence}", markup=False)
    if story.evidence:
        console.print("\nEvidence:")
        for line in story.evidence:
            console.print(f"  {line}", markup=False)
    if story.next_step:
        console.print(f"\nNext step:\n  {story.next_step}", style="green", markup=False)
    for kind, why in story.unreadable.items():
        console.print(f"(could not read {kind}: {why})", style="dim", markup=False)
