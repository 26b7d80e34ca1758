"""A condition that holds carries no reason of the time when it did not."""

from moorage.kube.objects import Pod
from moorage.node.pods import lifecycle


def test_a_condition_that_holds_takes_the_old_reason_away():
    held = lifecycle._condition(Pod(), "Ready", True, {}, now=0.0)
    assert (held["status"], held["reason"]) == ("True", None)
    broken = lifecycle._condition(Pod(), "Ready", False, {"reason": "ContainersNotReady"}, now=0.0)
    assert (broken["status"], broken["reason"]) == ("False", "ContainersNotReady")
