"""`moorage gc`: what no one owns any more, why, and its removal when asked for."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moorage import log
from moorage.cli import show
from moorage.cli.app import App, Kubeconfig, Output
from moorage.errors import UsageError
from moorage.kube.api import config
from moorage.kube.api.client import TRIES, TRIES_FOR_A_PERSON, Client
from moorage.storage import InvalidValue, Pool
from moorage.storage.guests import open_pool
from moorage.storage.tunables import seconds_from
from moorage.upkeep.gc.observe import observe
from moorage.upkeep.gc.plan import Orphan, plan
from moorage.upkeep.gc.remove import Removal, remove_all

app = App()


@app.command()
def gc(
    pool: Annotated[list[Path] | None, typer.Option(help="Directory of a pool. Name all pools of the node.")] = None,
    kubeconfig: Kubeconfig = "",
    no_cluster: Annotated[bool, typer.Option("--no-cluster", help="Look at the pool and this machine only.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is found; without it nothing is changed.")] = False,
    grace: Annotated[
        str, typer.Option(metavar="DURATION", help="Nothing younger than this is removed, such as 90s, 1h or 7d.")
    ] = "1h",
    trash_retention: Annotated[
        str, typer.Option(metavar="DURATION", help="How long deleted volumes are kept that have no time of their own.")
    ] = "24h",
    node: Annotated[
        str, typer.Option(metavar="NAME", help="The node of the pools. Otherwise this machine's name.")
    ] = "",
    driver: Annotated[
        str, typer.Option(metavar="NAME", help="The driver whose objects are checked.")
    ] = "csi.moorage.dev",
    output: Output = "text",
) -> None:
    """Find what is left over: volumes without PV, PVs without volume, stale attachments, devices, mounts, old trash.

    It gives the reason of each. It removes only with --yes, and never what is younger than --grace or mounted.

    Examples:

      moorage gc --pool /var/lib/moorage/pool --kubeconfig ~/.kube/config

      moorage gc --pool /var/lib/moorage/pool --no-cluster --yes
    """
    as_json = show.check_output(output)
    grace_s, kept_s = _seconds("--grace", grace), _seconds("--trash-retention", trash_retention)
    log.configure("warning")
    if no_cluster and kubeconfig:
        raise UsageError("--no-cluster and --kubeconfig exclude each other")
    if not pool and no_cluster:
        raise UsageError("there is nothing to look at: give --pool, or a cluster")
    api = None if no_cluster else _api(kubeconfig, is_needed=not pool)
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(open_pool(path, trash_retention_s=kept_s)) for path in pool or []]
        findings, removals = asyncio.run(_gc(pools, api, driver, node, grace_s, yes))
    if as_json:
        show.json_out(
            {
                "findings": [{**asdict(finding), "removable": not finding.held} for finding in findings],
                "removed": [asdict(done.finding) for done in removals if not done.error],
                "failed": [{**asdict(done.finding), "error": done.error} for done in removals if done.error],
                "looked_at_cluster": api is not None,
                "looked_at_pools": [str(path) for path in pool or []],
            }
        )
    else:
        _print(findings, removals, yes)
        show.say(_scope(driver, pool or [], api is not None))
    if any(done.error for done in removals):
        raise typer.Exit(1)


def _seconds(option: str, text: str) -> float:
    try:
        return seconds_from(text)
    except InvalidValue as failed:
        raise UsageError(f"{option} {text!r}: want a duration such as 90s, 15m, 24h or 7d") from failed


def _api(kubeconfig: str, is_needed: bool) -> config.ApiConfig | None:
    """The cluster to ask; with a pool alone, only one that was named."""
    if not kubeconfig and not is_needed and not os.environ.get("KUBECONFIG"):
        return None
    return config.load(kubeconfig or None)


async def _gc(
    pools: Sequence[Pool], api: config.ApiConfig | None, driver: str, node: str, grace_s: float, yes: bool
) -> tuple[list[Orphan], list[Removal]]:
    async with contextlib.AsyncExitStack() as stack:
        client = None
        if api is not None:
            tries = TRIES if yes else TRIES_FOR_A_PERSON
            client = await stack.enter_async_context(Client(api, identity="moorage-gc", tries=tries))
        world = await observe(pools, client, driver, node)
        findings = plan(world, grace_s)
        return findings, await remove_all(findings, world, pools, client) if yes else []


def _scope(driver: str, pools: Sequence[Path], asked_cluster: bool) -> str:
    """What was looked at, and what was not: an empty list says nothing about the rest."""
    objects = f"the cluster's objects of {driver}"
    if not pools:
        return f"Looked at the attachments among {objects} only. Give --pool for volumes, devices, mounts and trash."
    looked = f"pool {', '.join(map(str, pools))} and this machine"
    if asked_cluster:
        return f"Looked at {looked}, and at {objects}."
    return f"Looked at {looked} only. Give --kubeconfig for volumes without PersistentVolume and the reverse."


def _print(findings: Sequence[Orphan], removals: Sequence[Removal], yes: bool) -> None:
    if not findings:
        show.say("Nothing without an owner was found.")
        return
    results = {(done.finding.kind, done.finding.id): done.error for done in removals}
    for finding in findings:
        show.say(f"{finding.kind} {finding.id} ({show.age(finding.age_s)}): {finding.why}")
        error = results.get((finding.kind, finding.id))
        if finding.held:
            show.say(f"    kept: {finding.held}")
        elif error is None:
            show.say(f"    would {finding.action}")
        else:
            show.say(f"    not removed: {error}" if error else "    removed")
    free = sum(not finding.held for finding in findings)
    if free and not yes:
        show.say(f"{free} can be removed with --yes.")
