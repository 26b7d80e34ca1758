"""`moorage check`: the contract's rules, tried on any CSI driver."""

import asyncio
import json
import random
from collections import defaultdict
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from moorage.cli import show
from moorage.cli.app import App, CallTimeout, Endpoint, Output, SecretsFile
from moorage.cli.sizes import bytes_from
from moorage.conformance import report
from moorage.conformance.engine import run_checks
from moorage.conformance.model import Check, CheckConfig, CheckResult, Outcome, selected
from moorage.errors import UsageError
from moorage.host.safe_remove import temporary_directory
from moorage.process import run_until_signal

app = App()

_MARKS = {
    Outcome.PASSED: ("green", "ok  "),
    Outcome.FAILED: ("red", "FAIL"),
    Outcome.SKIPPED: ("yellow", "skip"),
    Outcome.NOT_RUN: ("yellow", "not run"),
    Outcome.FOLLOW_UP: ("yellow", "follow-up"),
}
_MOST_CALLS = 6
_INTERRUPTED = 130


@app.command()
def check(
    endpoint: Endpoint = "",
    workdir: Annotated[
        Path | None, typer.Option(help="Where the driver may stage and publish. Otherwise a temporary directory.")
    ] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the test volumes.")] = "64Mi",
    parameter: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For CreateVolume.")] = None,
    snapshot_parameter: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="For CreateSnapshot.")
    ] = None,
    mutable_parameter: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="For ControllerModifyVolume.")
    ] = None,
    secrets_file: SecretsFile = None,
    fs_type: Annotated[
        str, typer.Option(metavar="NAME", help="Filesystem to ask for. Otherwise the driver's own choice.")
    ] = "",
    block: Annotated[bool, typer.Option("--block", help="Use raw block volumes.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Run the checks whose id matches, as 'CreateVolume.*'.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="ID", help="Leave out the checks whose id matches.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the checks and stop.")] = False,
    seed: Annotated[int | None, typer.Option(help="Order of the checks. Otherwise another one each time.")] = None,
    jobs: Annotated[int, typer.Option(help="How many checks run at the same time.", min=1)] = 6,
    restart_command: Annotated[
        str,
        typer.Option(
            metavar="COMMAND", help="Command that starts the driver; enables the checks that kill it with SIGKILL."
        ),
    ] = "",
    timeout_s: CallTimeout = 60.0,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report as one HTML file.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report as JUnit XML.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print every check, not only the failed.")] = False,
    output: Output = "text",
) -> None:
    """Check any CSI driver against the contract; exit 1 when a check fails.

    Examples:

      moorage check --endpoint unix:///run/my-driver/csi.sock

      moorage check --only 'CreateSnapshot.*' --parameter kind=fast -o json
    """
    as_json = show.check_output(output)
    chosen = selected(only or (), skip or ())
    if show_list:
        _list(chosen, as_json)
        return
    if not endpoint:
        raise UsageError("which driver? Give --endpoint unix:///path/csi.sock, or set CSI_ENDPOINT")
    size_bytes = bytes_from("--size", size)
    with temporary_directory("moorage-check-") as scratch:
        config = CheckConfig(
            endpoint=endpoint,
            workdir=workdir or scratch,
            size_bytes=size_bytes,
            grown_bytes=2 * size_bytes,
            parameters=_pairs(parameter, "--parameter"),
            snapshot_parameters=_pairs(snapshot_parameter, "--snapshot-parameter"),
            mutable_parameters=_pairs(mutable_parameter, "--mutable-parameter"),
            secrets=_secrets(secrets_file),
            fs_type=fs_type,
            block=block,
            timeout_s=timeout_s,
            jobs=jobs,
            seed=random.randrange(10_000) if seed is None else seed,
            restart_command=restart_command,
        )
        progress = _Progress(len(chosen), as_json, verbose)
        is_interrupted = _run(config, progress, only or (), skip or ())
    for path, text in ((html, report.html_page), (junit, report.junit_xml)):
        if path is not None:
            path.write_text(text(progress.results, endpoint))
    _finish(config, progress, as_json, is_interrupted)


def _run(config: CheckConfig, progress: "_Progress", only: list[str] | tuple[()], skip: list[str] | tuple[()]) -> bool:
    """Run the checks. Returns whether a signal ended them before the last one."""

    async def collect() -> None:
        async with aclosing(run_checks(config, only=only, skip=skip)) as results:
            async for result in results:
                progress.note(result)

    try:
        asyncio.run(run_until_signal(collect()))
    except asyncio.CancelledError:
        return True
    finally:
        progress.clear()
    return False


class _Progress:
    """What was found so far, printed as it comes."""

    def __init__(self, total: int, is_quiet: bool, is_verbose: bool) -> None:
        self.results: list[CheckResult] = []
        self._total = total
        self._is_quiet = is_quiet
        self._is_verbose = is_verbose

    def note(self, result: CheckResult) -> None:
        self.results.append(result)
        if self._is_quiet:
            return
        if result.result is Outcome.FAILED or self._is_verbose:
            self.clear()
            _print(result)
        if show.is_terminal():
            show.status(f"{len(self.results)} of {self._total}: {report.summary(self.results)}")

    def clear(self) -> None:
        if show.is_terminal() and not self._is_quiet:
            show.status("")


def _print(result: CheckResult) -> None:
    took = f" {result.seconds * 1000:.0f} ms" if result.seconds else ""
    kind = f" ({result.kind})" if result.kind else ""
    show.say(_MARKS[result.result], f" {result.id}{kind}", ("dim", took))
    if result.result is not Outcome.FAILED:
        if why := report.reason(result):
            show.paragraph(why, "dim", indent=" " * 5)
        return
    lines = [("rule:", result.rule), ("expected:", result.expected), ("got:", result.detail)]
    for name, text in lines + [("note:", note) for note in result.notes]:
        if text and not (name == "expected:" and text == result.rule):
            show.paragraph(f"{name:<9} {text}", indent=" " * 5, hang=" " * 10)
    calls = report.calls_of(result)
    for call in calls[-_MOST_CALLS:]:
        show.paragraph(f"sent      {call.method} {call.request}", "dim", indent=" " * 5, hang=" " * 10)
        show.paragraph(f"came back {call.code} {call.answer}", "dim", indent=" " * 5, hang=" " * 10)
    if calls:
        show.say("     by hand:")
    for call in calls[-_MOST_CALLS:]:
        show.command(call.command)


def _finish(config: CheckConfig, progress: _Progress, as_json: bool, is_interrupted: bool) -> None:
    results = progress.results
    if as_json:
        show.json_out(results)
    else:
        _because(results)
        show.say(f"{report.summary(results)} (seed {config.seed})")
        if is_interrupted:
            show.say("interrupted; what the checks had made is removed", style="yellow")
    if is_interrupted:
        raise typer.Exit(_INTERRUPTED)
    if any(result.result is Outcome.FAILED for result in results):
        raise typer.Exit(1)


def _because(results: list[CheckResult]) -> None:
    """Say for each failure how many other checks were not run, or failed as well, because of it."""
    followers: dict[tuple[str, Outcome], int] = defaultdict(int)
    for result in results:
        if result.because:
            followers[result.because, result.result] += 1
    for (owner, outcome), number in followers.items():
        checks = f"{number} check{'s' if number > 1 else ''}"
        if outcome is Outcome.NOT_RUN:
            show.say(f"not run because {owner} failed: {checks}", style="yellow")
        else:
            show.say(f"failed as well, which follows from {owner}: {checks} (-v shows them)", style="yellow")


def _list(chosen: list[Check], as_json: bool) -> None:
    if as_json:
        show.json_out([{"id": one.id, "rule": one.rule, "needs": one.needs, "stage": one.stage} for one in chosen])
    else:
        show.columns(("CHECK", "RULE"), [(one.id, one.rule) for one in chosen])


def _secrets(path: Path | None) -> dict[str, str]:
    """Return names and values. No error shows a value."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: it cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise UsageError(f"{path}: want a JSON object of strings")
    return found


def _pairs(items: list[str] | None, option: str) -> dict[str, str]:
    pairs = {}
    for item in items or []:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UsageError(f"{option} {item!r}: want KEY=VALUE")
        pairs[key] = value
    return pairs
