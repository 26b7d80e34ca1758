"""Steps in order, shares of the time, log lines of both formats, and the Perfetto document."""

import os
import time

import msgspec
import pytest

from moorage.cli.trace import _table
from moorage.errors import UsageError
from moorage.insight.log_records import read_records
from moorage.insight.perfetto import document
from moorage.insight.trace import assemble, shares
from moorage.insight.trace_sources import TraceStep, from_call
from moorage.insight.waiting import WaitingCall
from moorage.kube.objects import Event, Pod


def exact(at, who, what, took=None, reason="log", obj="pvc/data"):
    return TraceStep(at, who, obj, what, "log" if took else "event", took, True, False, "call" if took else reason)


def test_a_call_is_its_callee_s_time_and_what_comes_before_is_its_caller_s():
    steps = [
        exact(10.0, "binder", "asked"),
        exact(13.0, "driver", "CreateVolume OK", took=2.0),
        exact(13.5, "scheduler", "Scheduled: yes"),
    ]
    told, seconds = shares(steps, None)
    assert seconds == pytest.approx(3.5)
    assert {share.who: share.seconds for share in told} == {"driver": 2.0, "provisioner": 1.0, "scheduler": 0.5}
    assert told[0].longest == "CreateVolume OK"


def test_what_was_noted_during_a_call_is_not_counted_twice():
    steps = [exact(12.9, "driver", "volume staged"), exact(13.0, "driver", "NodeStageVolume OK", took=2.0)]
    told, seconds = shares(steps, None)
    assert [(share.who, share.seconds) for share in told] == [("driver", 2.0)]
    assert seconds == 2.0


def test_what_is_not_done_counts_until_now():
    told, seconds = shares([exact(10.0, "binder", "asked")], 25.0)
    assert (told[0].who, told[0].seconds, seconds) == ("(unknown)", 15.0, 15.0)


def test_a_pod_s_time_begins_and_ends_with_the_pod_itself():
    steps = [
        exact(1.0, "provisioner", "volume provisioned", reason="ProvisioningSucceeded"),
        exact(2.0, "node agent", "Started: other", reason="Started", obj="pod/other"),
        TraceStep(50.0, "kubectl", "pod/web", "created", "object", reason="Created"),
        exact(51.0, "node agent", "Started: other again", reason="Started", obj="pod/other"),
        exact(53.0, "scheduler", "Scheduled: yes", reason="Scheduled", obj="pod/web"),
    ]
    told = assemble("pod/web", [], steps, ("Started",), 60.0)
    assert (told.is_done, told.start, told.seconds) == (False, 50.0, pytest.approx(10.0))
    started = exact(54.0, "node agent", "Started: c", reason="Started", obj="pod/web")
    told = assemble("pod/web", [], [*steps, started], ("Started",), 60.0)
    assert (told.is_done, told.seconds) == (True, pytest.approx(4.0))


def test_a_call_that_both_sides_record_is_told_once_and_a_repeated_one_twice():
    driver = exact(13.0, "driver", "NodeStageVolume OK", took=2.0)
    caller = exact(13.1, "driver", "NodeStageVolume OK", took=2.2)
    again = exact(20.0, "driver", "NodeStageVolume OK", took=3.0)
    told = assemble("pvc/data", [], [caller, driver, again], (), 20.0)
    assert [step.at for step in told.steps] == [13.0, 20.0]


def test_a_call_without_answer_is_the_driver_s_time():
    waiting = WaitingCall("NodeStageVolume", "d.example.com", 70.0, Event())
    web = msgspec.convert({"metadata": {"namespace": "default", "name": "web"}}, Pod)
    scheduled = exact(29.0, "scheduler", "Scheduled: yes", obj="pod/web")
    told = assemble("pod/web", [], [scheduled, from_call(web, waiting, 100.0)], ("Started",), 100.0)
    assert told.steps[-1].what == "NodeStageVolume has no answer from driver d.example.com yet"
    assert {share.who: share.seconds for share in told.shares} == {"driver": 70.0, "node agent": 1.0}


@pytest.mark.parametrize("width", [80, 120])
def test_what_happened_is_shown_at_every_width(width):
    row = ("23:08:18.575", "+0.000", "", "kubectl-client-side-apply", "pvc/data-of-the-statefulset-0", "word " * 30)
    for lines in _table([("time", "since", "took", "who", "object", "what"), row], width):
        assert all(len(line) <= width for line in lines)
    assert sum(line.count("word ") for line in lines) >= 6


def test_order_within_a_second_and_the_end():
    created = TraceStep(10.0, "kubectl", "pvc/data", "created", "object", reason="Created")
    volume = TraceStep(10.0, "provisioner", "pv/x", "created", "object", reason="Created")
    ready = TraceStep(10.0, "node agent", "pod/web", "condition Ready", "object", reason="Ready")
    started = exact(10.8, "node agent", "Started: c", reason="Started", obj="pod/web")
    later = exact(99.0, "binder", "later")
    told = assemble(
        "pvc/data", [], [later, ready, started, volume, created, exact(10.5, "binder", "bound")], ("Started",), 100.0
    )
    assert [step.what for step in told.steps] == [
        "created",
        "bound",
        "Started: c",
        "created",
        "condition Ready",
        "later",
    ]
    assert told.is_done
    assert told.seconds == pytest.approx(0.3)  # from the first exact step of the second in which it was created
    assert told.start == 10.5


def test_conditions_that_an_event_tells_better_are_left_out():
    condition = TraceStep(10.0, "", "pod/web", "condition PodScheduled", "object", reason="PodScheduled")
    event = exact(10.2, "scheduler", "Scheduled: to node-1", reason="Scheduled", obj="pod/web")
    assert [step.what for step in assemble("pod/web", [], [condition, event], (), 11.0).steps] == [
        "Scheduled: to node-1"
    ]


def test_both_formats_of_logs(tmp_path):
    (tmp_path / "driver.log").write_text(
        "12:00:01.250 INFO csi.server: call method=CreateVolume code=OK seconds=0.250 "
        'request="{\\"name\\":\\"pvc-1\\"}"\n'
        "Traceback of something\n"
        "12:00:02.000 WARNING storage.pool: almost full pool=default\n"
    )
    (tmp_path / "agent.log").write_text(
        '{"time": "2024-05-01T12:00:01.500Z", "level": "info", "logger": "moorage.sidecars.provisioner.claims",'
        ' "event": "volume provisioned", "volume": "pvc-1"}\n{not json\n'
    )
    noon = time.mktime((2024, 5, 1, 12, 5, 0, 0, 0, -1))
    os.utime(tmp_path / "driver.log", (noon, noon))
    found = {record.event: record for record in read_records(tmp_path, ["pvc-1", ""])}
    assert set(found) == {"call", "volume provisioned"}
    assert found["call"].at == pytest.approx(noon - 298.75)
    assert found["call"].seconds == 0.25
    assert found["call"].fields["request"] == '{"name":"pvc-1"}'
    assert found["volume provisioned"].logger == "sidecars.provisioner.claims"
    assert found["volume provisioned"].seconds is None


def test_a_log_that_ran_over_midnight(tmp_path):
    lines = (
        "23:59:59.900 INFO a: x one",
        "00:00:00.100 INFO a: x two",
        "23:00:00.000 INFO a: x three",
        "01:00:00.000 INFO a: x four",
    )
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    written = time.mktime((2024, 5, 3, 1, 0, 0, 0, 0, -1))
    os.utime(tmp_path / "a.log", (written, written))
    days = [time.localtime(record.at).tm_mday for record in read_records(tmp_path, ["x"])]
    assert days == [1, 2, 2, 3]


def test_logs_that_are_not_there(tmp_path):
    with pytest.raises(UsageError, match="there is no such directory"):
        read_records(tmp_path / "nowhere", ["x"])


def test_the_perfetto_document_has_a_track_for_each_and_the_waits():
    steps = [exact(10.0, "binder", "asked: please"), exact(13.0, "driver", "CreateVolume OK", took=2.0)]
    made = document(assemble("pvc/data", [], steps, (), 13.0))
    names = {event["args"]["name"]: event["tid"] for event in made["traceEvents"] if event["name"] == "thread_name"}
    assert set(names) == {"waiting", "binder", "driver"}
    rest = [event for event in made["traceEvents"] if event["ph"] != "M"]
    assert [(e["ph"], e["name"], e["ts"], e.get("dur")) for e in rest] == [
        ("i", "asked", 0, None),
        ("X", "CreateVolume OK", 1_000_000, 2_000_000),
        ("X", "until driver: CreateVolume OK", 0, 1_000_000),
    ]
    assert made["displayTimeUnit"] == "ms"
