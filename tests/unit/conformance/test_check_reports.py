"""What `moorage check` prints and writes: ids, commands that repeat a call, reports without tricks of the driver."""

import re
import shlex
import sys
from xml.etree import ElementTree

import pytest

from moorage.conformance import report
from moorage.conformance.model import REGISTRY, CheckResult, Exchange, FailureKind, Outcome, Stage, selected
from moorage.conformance.reproduce import command_for
from moorage.csi import csi_pb2 as pb
from moorage.csi import text
from moorage.errors import UsageError

EVIL = "\x1b]0;owned\x07</td><script>alert(1)</script>\u202e\nFAIL fake"


def result(**changes) -> CheckResult:
    base = {"id": "A.b", "rule": "A rule.", "result": Outcome.FAILED, "kind": FailureKind.HANG, "detail": EVIL}
    calls = (Exchange("CreateVolume", EVIL, f"moorage csi {EVIL}", "OK", EVIL),)
    return CheckResult(**{**base, "calls": calls, **changes})


def test_a_command_sends_the_same_request_again_without_its_secrets():
    request = pb.CreateVolumeRequest(
        name="a b; $(touch x)",
        capacity_range=pb.CapacityRange(required_bytes=1 << 30),
        parameters={"kind": "fast", "a.b": "c"},
        secrets={"password": "hunter2"},
        volume_capabilities=[
            pb.VolumeCapability(
                mount=pb.VolumeCapability.MountVolume(fs_type="xfs"),
                access_mode=pb.VolumeCapability.AccessMode(mode=pb.VolumeCapability.AccessMode.SINGLE_NODE_WRITER),
            )
        ],
    )
    words = shlex.split(command_for("CreateVolume", request, "unix:///run/csi.sock"))
    assert words[:3] == ["moorage", "csi", "CreateVolume"]
    fields = words[3 : words.index("--endpoint")]
    assert words[words.index("--endpoint") :] == [
        "--endpoint",
        "unix:///run/csi.sock",
        "--secrets-file",
        "SECRETS.json",
    ]
    again = text.request_from("CreateVolume", fields)
    request.ClearField("secrets")
    assert again == request
    assert "hunter2" not in " ".join(words)


def test_a_report_of_a_hostile_driver_holds_no_markup_and_no_control_characters():
    page = report.html_page([result()], EVIL)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    xml = report.junit_xml([result(), result(id="C.d", result=Outcome.NOT_RUN, because="A.b", kind=None)], EVIL)
    suite = ElementTree.fromstring(xml)
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "1")
    [failure] = suite.iter("failure")
    assert failure.get("type") == "hang"
    [skipped] = suite.iter("skipped")
    assert skipped.get("message") == "A.b failed"


def test_every_check_has_an_id_and_a_rule_that_is_a_sentence():
    assert len(selected()) >= 200
    for one in selected():
        assert re.fullmatch(r"[A-Za-z]+\.[a-z0-9-]+", one.id), one.id
        assert one.rule.endswith("."), one.id


def test_the_checks_that_others_rely_on_run_first():
    import inspect

    source = "".join(inspect.getsource(sys.modules[one.body.__module__]) for one in selected())
    relied_on = set(re.findall(r'\.given\("([^"]+)"\)', source))
    assert relied_on
    assert {REGISTRY[name].stage for name in relied_on} == {Stage.BASIC}


def test_checks_are_chosen_by_patterns_and_a_pattern_that_matches_nothing_is_an_error():
    chosen = {one.id for one in selected(["CreateVolume.*"], ["*.needs-*"])}
    assert "CreateVolume.works" in chosen
    assert not any("needs" in one or not one.startswith("CreateVolume.") for one in chosen)
    with pytest.raises(UsageError, match="no check matches"):
        selected(["NoSuchCheck.*"])
