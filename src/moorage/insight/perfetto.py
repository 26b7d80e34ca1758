"""A trace as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

Owns: that JSON format: one process, one track for everybody who did something, one for what was waited for.
May not touch: files; the caller writes.
Start reading at: `document`.
"""

from typing import Any

from moorage.insight.trace import Trace, TraceStep

_PID = 1
_WAITS = "waiting"


def document(trace: Trace) -> dict[str, Any]:
    """The whole file as plain data."""
    start = min((step.begin for step in trace.steps), default=0.0)
    tracks = [_WAITS, *dict.fromkeys(step.who or "?" for step in trace.steps)]
    events: list[dict[str, Any]] = [_named("process_name", 0, f"moorage trace {trace.object}")]
    events += [_named("thread_name", at, track) for at, track in enumerate(tracks)]
    events += [_event(step, start, tracks.index(step.who or "?")) for step in trace.steps]
    events += _waits(trace.steps, start)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"object": trace.object, "start": start}}


def _named(what: str, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PID, "tid": tid, "args": {"name": name}}


def _event(step: TraceStep, start: float, tid: int) -> dict[str, Any]:
    shared = {
        "name": step.what.partition(":")[0][:60],
        "cat": step.source,
        "pid": _PID,
        "tid": tid,
        "ts": _microseconds(step.begin - start),
        "args": {"what": step.what, "object": step.object, "exact": step.is_exact, "failed": step.is_failure},
    }
    if step.took:
        return {**shared, "ph": "X", "dur": max(1, _microseconds(step.took))}
    return {**shared, "ph": "i", "s": "t"}


def _waits(steps: list[TraceStep], start: float) -> list[dict[str, Any]]:
    """The gaps between exact steps, named by what ended them."""
    exact = [step for step in steps if step.is_exact]
    spans, at = [], exact[0].at if exact else 0.0
    for step in exact[1:]:
        if step.begin - at > 0.0005:
            spans.append(
                {
                    "ph": "X",
                    "name": f"until {step.who}: {step.what.partition(':')[0][:60]}",
                    "cat": "wait",
                    "pid": _PID,
                    "tid": 0,
                    "ts": _microseconds(at - start),
                    "dur": _microseconds(step.begin - at),
                    "args": {"object": step.object},
                }
            )
        at = max(at, step.at)
    return spans


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
