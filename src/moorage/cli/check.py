"""`moorage check`: the contract's promises, tried on any CSI driver."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from moorage.cli import show
from moorage.cli.show import Output
from moorage.conformance.suite import CheckConfig, CheckResult, run_checks
from moorage.errors import UsageError
from moorage.host.safe_remove import temporary_directory

app = typer.Typer()

_MARKS = {"passed": ("green", "ok  "), "failed": ("red", "FAIL"), "skipped": ("yellow", "skip")}


@app.command()
def check(
    endpoint: Annotated[str, typer.Option(help="The driver's socket, unix:///path/csi.sock.")],
    workdir: Annotated[
        Path | None, typer.Option(help="Where the driver may stage and publish (default: temporary).")
    ] = None,
    size_mib: Annotated[int, typer.Option(help="Size of the test volumes in MiB.", min=1)] = 64,
    parameter: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for CreateVolume; repeatable.")] = None,
    snapshot_parameter: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for CreateSnapshot.")] = None,
    mutable_parameter: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for ControllerModifyVolume.")] = None,
    secrets_file: Annotated[
        Path | None, typer.Option(help="JSON object with the secrets to send; never printed.")
    ] = None,
    fs_type: Annotated[str, typer.Option(help="Filesystem to ask for (default: the driver's).")] = "",
    block: Annotated[bool, typer.Option(help="Use raw block volumes.")] = False,
    only: Annotated[str, typer.Option(help="Run only checks whose service or title contains this.")] = "",
    timeout_s: Annotated[float, typer.Option(help="Deadline of each call, in seconds.")] = 60.0,
    output: Output = "text",
) -> None:
    """Check any CSI driver against the contract; exit 1 when a check fails.

    Example: moorage check --endpoint unix:///run/my-driver/csi.sock --parameter kind=fast
    """
    as_json = show.check_output(output)
    with temporary_directory("moorage-check-") as scratch:
        config = CheckConfig(
            endpoint=endpoint,
            workdir=workdir or scratch,
            size_bytes=size_mib << 20,
            grown_bytes=size_mib << 21,
            parameters=_pairs(parameter, "--parameter"),
            snapshot_parameters=_pairs(snapshot_parameter, "--snapshot-parameter"),
            mutable_parameters=_pairs(mutable_parameter, "--mutable-parameter"),
            secrets=json.loads(secrets_file.read_text()) if secrets_file else {},
            fs_type=fs_type,
            block=block,
            timeout_s=timeout_s,
        )
        outcomes = asyncio.run(_collect(config, only, quiet=as_json))
    if as_json:
        show.json_out(outcomes)
    else:
        _summary(outcomes)
    if any(outcome.result == "failed" for outcome in outcomes):
        raise typer.Exit(1)


async def _collect(config: CheckConfig, only: str, quiet: bool) -> list[CheckResult]:
    outcomes, service = [], ""
    async for outcome in run_checks(config, only):
        outcomes.append(outcome)
        if quiet:
            continue
        if outcome.service != service:
            service = outcome.service
            show.say(service, style="bold")
        took = f" {outcome.seconds * 1000:.0f} ms" if outcome.seconds else ""
        show.say("  ", _MARKS[outcome.result], f" {outcome.title}", ("dim", took))
        if outcome.detail:
            show.paragraph(outcome.detail, "dim" if outcome.result == "skipped" else "red", indent=" " * 7)
    return outcomes


def _summary(outcomes: list[CheckResult]) -> None:
    counts = {result: sum(o.result == result for o in outcomes) for result in ("passed", "failed", "skipped")}
    show.say(", ".join(f"{number} {result}" for result, number in counts.items()))


def _pairs(items: list[str] | None, option: str) -> dict[str, str]:
    pairs = {}
    for item in items or []:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UsageError(f"{option} {item!r}: want KEY=VALUE")
        pairs[key] = value
    return pairs
