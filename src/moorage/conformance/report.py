"""The results of a run as one HTML file, as JUnit XML, and counted.

Owns: the two formats. All text from the driver passes `printable` and the escaping of the format.
Start reading at: `html_page`, `junit_xml`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from xml.etree import ElementTree

from moorage.conformance.model import CheckResult, Exchange, Outcome
from moorage.printable import one_line

_MOST_CALLS = 40
LONGEST_COMMAND = 16_384

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin: 1.6em 0 .4em }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .25em .6em; vertical-align: top }
tr { border-top: 1px solid #ddd } code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere }
pre { background: #f5f5f5; padding: .6em; white-space: pre-wrap } .passed { color: #176f2c } .failed { color: #b00020 }
.skipped, .not.run { color: #777 } details { margin: .3em 0 }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } pre { background: #222 }
tr { border-color: #333 } .passed { color: #6c6 } .failed { color: #f77 } }
"""


def counts(results: Iterable[CheckResult]) -> dict[str, int]:
    """Return how many checks had each outcome."""
    found = Counter(result.result for result in results)
    return {str(outcome): found[outcome] for outcome in Outcome}


def summary(results: Iterable[CheckResult]) -> str:
    """Return the counts in one line, without those that are zero."""
    return ", ".join(f"{number} {outcome}" for outcome, number in counts(results).items() if number) or "no checks"


def calls_of(result: CheckResult) -> list[Exchange]:
    """Return the calls that tell what happened: those of the check, then those of its clean-up that failed."""
    own = [one for one in result.calls if not one.is_cleanup]
    return own + [one for one in result.calls if one.is_cleanup and one.code != "OK"]


def reason(result: CheckResult) -> str:
    """Return why a check was not passed, in one sentence."""
    if result.result is Outcome.FOLLOW_UP:
        return f"{result.detail}; this follows from {result.because}"
    return f"{result.because} failed" if result.because else result.detail


def html_page(results: Sequence[CheckResult], driver: str) -> str:
    """Return the whole report. It loads nothing from other places and runs no script."""
    title = f"moorage check: {_text(driver)}"
    failed = [result for result in results if result.result is Outcome.FAILED]
    rows = "".join(_row(result) for result in sorted(results, key=lambda one: one.id))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{_text(summary(results))}</p>"
        + "".join(_failure(result) for result in failed)
        + f"<h2>All checks</h2><table><tr><th>check<th>result<th>seconds<th>rule</tr>{rows}</table></html>\n"
    )


def _failure(result: CheckResult) -> str:
    calls = calls_of(result)
    shown = "\n".join(f"{one.method} {one.request}\n  → {one.code} {one.answer}" for one in calls[-_MOST_CALLS:])
    again = "\n".join(one_line(one.command, LONGEST_COMMAND) for one in calls[-_MOST_CALLS:])
    lines = [("rule", result.rule), ("expected", result.expected), ("got", result.detail)]
    lines += [("note", note) for note in result.notes]
    table = "".join(f"<tr><th>{name}<td>{_text(value)}</tr>" for name, value in lines if value)
    return (
        f'<h2 class="failed">{_text(result.id)} ({_text(result.kind or "")})</h2><table>{table}</table>'
        f"<details open><summary>what was sent, and what came back</summary><pre>{_lines(shown)}</pre></details>"
        f"<details><summary>the same calls by hand</summary><pre>{_lines(again)}</pre></details>"
    )


def _row(result: CheckResult) -> str:
    why = f"<br><small>{_text(reason(result))}</small>" if result.result is not Outcome.PASSED else ""
    return (
        f'<tr><td><code>{_text(result.id)}</code><td class="{result.result}">{result.result}'
        f"<td>{result.seconds:.2f}<td>{_text(result.rule)}{why}</tr>"
    )


def _text(text: str) -> str:
    return escape(one_line(text))


def _lines(text: str) -> str:
    return "\n".join(escape(one_line(line, LONGEST_COMMAND)) for line in text.split("\n"))


def junit_xml(results: Sequence[CheckResult], driver: str) -> str:
    """Return the results as JUnit XML. What was not run, or follows from another failure, counts as skipped."""
    number = counts(results)
    suite = ElementTree.Element(
        "testsuite",
        name=f"moorage check {one_line(driver)}",
        tests=str(len(results)),
        failures=str(number["failed"]),
        errors="0",
        skipped=str(number["skipped"] + number["not run"] + number["follow-up"]),
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    for result in results:
        subject, _, _ = result.id.partition(".")
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"moorage.{subject}", name=result.id, time=f"{result.seconds:.3f}"
        )
        if result.result is Outcome.FAILED:
            kind = str(result.kind or "")
            node = ElementTree.SubElement(case, "failure", type=kind, message=one_line(result.detail))
            calls = [f"{one.method} {one.request} -> {one.code} {one.answer}" for one in calls_of(result)]
            commands = [one_line(one.command, LONGEST_COMMAND) for one in calls_of(result)]
            text = [f"rule: {result.rule}", f"expected: {result.expected}", *calls, *commands]
            node.text = "\n".join(one_line(line, LONGEST_COMMAND) for line in text)
        elif result.result is not Outcome.PASSED:
            ElementTree.SubElement(case, "skipped", message=one_line(reason(result)))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
