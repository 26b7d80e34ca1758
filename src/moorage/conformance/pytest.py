"""A pytest plugin: every check as a test in a driver author's own suite.

Owns: the option and the fixture that name the driver, and the translation of results into tests.
Start reading at: `csi_driver`, `test_check`.

In `conftest.py`: `pytest_plugins = ["moorage.conformance.pytest"]`, and a fixture `csi_driver` (scope session) that
starts the driver and yields a `CheckConfig`. In a test module: `from moorage.conformance.pytest import test_check`.
"""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moorage.conformance import report
from moorage.conformance.engine import run_checks
from moorage.conformance.model import CheckConfig, CheckResult, Outcome, selected
from moorage.host.safe_remove import temporary_directory
from moorage.printable import one_line

__all__ = ["CheckConfig", "check_results", "csi_driver", "test_check"]

_FIXTURE = "csi_check"
_MOST_CALLS = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moorage", "checks of a CSI driver")
    group.addoption("--csi-endpoint", default="", help="Socket of the driver, unless a fixture csi_driver names it.")
    group.addoption("--csi-only", action="append", default=[], help="Checks to run, by pattern of their ids.")
    group.addoption("--csi-skip", action="append", default=[], help="Checks to leave out, by pattern of their ids.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each check."""
    if _FIXTURE in metafunc.fixturenames:
        options = metafunc.config.option
        metafunc.parametrize(_FIXTURE, [one.id for one in selected(options.csi_only, options.csi_skip)])


@pytest.fixture(scope="session")
def csi_driver(request: pytest.FixtureRequest) -> Any:
    """The driver to check. Override this fixture to start a driver; yield its CheckConfig."""
    endpoint = request.config.option.csi_endpoint
    if not endpoint:
        pytest.fail("define a fixture csi_driver, or give --csi-endpoint unix:///path/csi.sock", pytrace=False)
    return CheckConfig(endpoint, Path())


@pytest.fixture(scope="session")
def check_results(request: pytest.FixtureRequest, csi_driver: CheckConfig) -> dict[str, CheckResult]:
    """The results of the checks that this session has tests for, by id. All run together, in parallel."""
    wanted: set[str] = {
        str(item.callspec.params[_FIXTURE])
        for item in request.session.items
        if isinstance(item, pytest.Function) and _FIXTURE in getattr(getattr(item, "callspec", None), "params", {})
    }
    with temporary_directory("csi-check-") as scratch:
        config = csi_driver if csi_driver.workdir != Path() else replace(csi_driver, workdir=scratch)
        return asyncio.run(_run(config, sorted(wanted)))


async def _run(config: CheckConfig, only: list[str]) -> dict[str, CheckResult]:
    async with aclosing(run_checks(config, only=only)) as results:
        return {result.id: result async for result in results}


def test_check(check_results: dict[str, CheckResult], csi_check: str) -> None:
    """One rule of the contract."""
    result = check_results[csi_check]
    if result.result is Outcome.FAILED:
        pytest.fail(explained(result), pytrace=False)
    if result.result is not Outcome.PASSED:
        pytest.skip(report.reason(result))


def explained(result: CheckResult) -> str:
    """Return what a failed check found, with its last calls."""
    lines = [
        f"{result.id} ({result.kind})",
        f"rule:     {result.rule}",
        f"expected: {result.expected}",
        f"got:      {result.detail}",
        *(f"note:     {note}" for note in result.notes),
    ]
    for call in report.calls_of(result)[-_MOST_CALLS:]:
        lines += [f"sent      {call.method} {call.request}", f"came back {call.code} {call.answer}"]
    lines += [f"by hand:  {call.command}" for call in report.calls_of(result)[-_MOST_CALLS:]]
    return "\n".join(one_line(line, report.LONGEST_COMMAND) for line in lines)
