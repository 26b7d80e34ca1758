"""The volume manager's plan, as a table of worlds in and actions out."""

from dataclasses import replace

import pytest

from moorage.kube.volumes import VolumeName
from moorage.node.layout import PodUid
from moorage.node.volumes.plan import PASSING, plan_volume
from moorage.node.volumes.state import (
    ActualPod,
    ActualVolume,
    CsiSource,
    Expand,
    MountState,
    MountVolume,
    PodRef,
    StepFailure,
    StepOutcome,
    UnmountDevice,
    UnmountVolume,
    VolumeBackoff,
    VolumeState,
    VolumeUse,
    settle,
)

NAME = VolumeName("kubernetes.io/csi/driver^vol")
ONE, TWO = PodUid("pod-1"), PodUid("pod-2")
SOURCE = CsiSource("driver", "vol", "pv", access_modes=("ReadWriteOnce",))


def use(uid=ONE, **fields):
    return VolumeUse(NAME, PodRef(uid, "ns", f"name-{uid}"), fields.pop("source", SOURCE), ("data",), **fields)


def world(uses=(), pods=(), device=MountState.ABSENT, **fields):
    made = VolumeState(**{"is_ready": True, **fields})
    if uses:
        made.desired[NAME] = {one.pod.uid: one for one in uses}
    if pods or device is not MountState.ABSENT:
        actual = made.actual[NAME] = ActualVolume(NAME, SOURCE, device=device)
        actual.pods = {uid: ActualPod(state) for uid, state in pods}
    return made


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(world([use()]), MountVolume(use()), id="a wanted volume is mounted"),
        pytest.param(
            world([use()], [(ONE, MountState.MOUNTED)], MountState.MOUNTED), None, id="a mounted one is left alone"
        ),
        pytest.param(
            world([use()], [(ONE, MountState.UNCERTAIN)]), MountVolume(use()), id="an uncertain mount is repeated"
        ),
        pytest.param(
            world([], [(ONE, MountState.MOUNTED)], MountState.MOUNTED),
            UnmountVolume(NAME, ONE),
            id="nobody wants it: it goes",
        ),
        pytest.param(
            world([], [(ONE, MountState.UNCERTAIN)], MountState.MOUNTED),
            UnmountVolume(NAME, ONE),
            id="an uncertain mount goes too",
        ),
        pytest.param(world([], [], MountState.MOUNTED), UnmountDevice(NAME), id="the device goes last"),
        pytest.param(world([], [], MountState.UNCERTAIN), UnmountDevice(NAME), id="an uncertain device goes too"),
        pytest.param(
            world([use(TWO)], [(ONE, MountState.MOUNTED)], MountState.MOUNTED),
            UnmountVolume(NAME, ONE),
            id="the old pod loses it before the new one gets it",
        ),
        pytest.param(
            world([], [(ONE, MountState.MOUNTED)], MountState.MOUNTED, is_ready=False),
            None,
            id="nothing goes before all is known",
        ),
        pytest.param(
            world([], [(ONE, MountState.MOUNTED)], MountState.MOUNTED, held={ONE}),
            None,
            id="nothing goes under a running process",
        ),
        pytest.param(
            world([], [(ONE, MountState.UNCERTAIN)], MountState.MOUNTED, held={ONE}),
            UnmountVolume(NAME, ONE),
            id="but a process cannot have what never was certain",
        ),
        pytest.param(world([use(is_attachable=True)]), None, id="not mounted before it is reported in use"),
        pytest.param(
            world([use(is_attachable=True)], in_use_reported=frozenset({NAME})), None, id="nor before it is attached"
        ),
        pytest.param(
            world([use(is_attachable=True)], in_use_reported=frozenset({NAME}), attached=frozenset({NAME})),
            MountVolume(use(is_attachable=True)),
            id="mounted once both are true",
        ),
        pytest.param(
            world([use(size_bytes=20, claim_size_bytes=10)], [(ONE, MountState.MOUNTED)], MountState.MOUNTED),
            Expand(use(size_bytes=20, claim_size_bytes=10)),
            id="a grown volume is grown here",
        ),
        pytest.param(
            world(
                [use(size_bytes=20, claim_size_bytes=10, read_only=True)],
                [(ONE, MountState.MOUNTED)],
                MountState.MOUNTED,
            ),
            None,
            id="not for a reader",
        ),
    ],
)
def test_one_step_follows_from_both_states(state, expected):
    assert plan_volume(state, NAME, now=100.0).action == expected


def test_what_an_earlier_agent_has_left_to_a_running_process_stays():
    state = world([], [(ONE, MountState.UNCERTAIN)], MountState.UNCERTAIN, held={ONE})
    state.actual[NAME].pods[ONE].is_reconstructed = True
    assert plan_volume(state, NAME, now=100.0).action is None


def test_a_volume_that_left_both_states_is_forgotten():
    empty = world()
    empty.actual[NAME] = ActualVolume(NAME, SOURCE)
    assert plan_volume(empty, NAME, 0.0).forget


def test_a_volume_with_an_operation_under_way_is_left_alone():
    state = world([use()], [(TWO, MountState.MOUNTED)], MountState.MOUNTED)
    state.actual[NAME].pending = UnmountDevice(NAME)
    assert plan_volume(state, NAME, 0.0).action is None


@pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
def test_a_volume_of_a_pod_that_is_no_more_waits_for_the_end_of_its_processes_but_not_for_ever(mode):
    source = CsiSource("driver", "vol", "pv", access_modes=(mode,))
    state = world(
        [use(TWO, source=source)], [(ONE, MountState.MOUNTED)], MountState.MOUNTED, held={ONE}, leaving={ONE: 20.0}
    )
    step = plan_volume(state, NAME, now=10.0)
    assert (step.action, step.look_again_at) == (None, 20.0)
    assert step.waiting[TWO] in PASSING
    step = plan_volume(state, NAME, now=20.0)
    assert step.action == (MountVolume(use(TWO, source=source)) if mode == "ReadWriteOnce" else None)


@pytest.mark.parametrize(
    ("modes", "leaving"),
    [
        pytest.param(("ReadWriteMany",), ONE, id="a volume for many"),
        pytest.param(("ReadWriteOnce", "ReadOnlyMany"), ONE, id="a volume that may be read by many"),
        pytest.param(("ReadWriteOnce",), PodUid("pod-3"), id="a pod that has other volumes"),
    ],
)
def test_nobody_waits_for_a_pod_that_is_no_more_where_it_is_in_no_ones_way(modes, leaving):
    source = CsiSource("driver", "vol", "pv", access_modes=modes)
    uses = [use(ONE, source=source), use(TWO, source=source)]
    state = world(uses, [(ONE, MountState.MOUNTED)], MountState.MOUNTED, leaving={leaving: 20.0})
    assert plan_volume(state, NAME, now=10.0).action == MountVolume(use(TWO, source=source))


def test_a_read_write_once_pod_volume_waits_for_the_other_pod_even_if_uncertain():
    exclusive = CsiSource("driver", "vol", "pv", access_modes=("ReadWriteOncePod",))
    state = world(
        [use(ONE, source=exclusive), use(TWO, source=exclusive)], [(ONE, MountState.UNCERTAIN)], MountState.MOUNTED
    )
    state.actual[NAME].backoffs[("mount", ONE)] = VolumeBackoff(1, 50.0)
    step = plan_volume(state, NAME, now=10.0)
    assert step.action is None
    assert "ReadWriteOncePod" in step.waiting[TWO]
    assert step.look_again_at == 50.0


def test_back_off_of_one_pod_does_not_hold_up_another():
    state = world([use(ONE), use(TWO)], [(ONE, MountState.UNCERTAIN)], MountState.MOUNTED)
    state.actual[NAME].backoffs[("mount", ONE)] = VolumeBackoff(1, 50.0)
    assert plan_volume(state, NAME, now=10.0).action == MountVolume(use(TWO))


def failed_stages(uids, until, refuses=lambda uid: True):
    """The pods for which a stage was tried, and failed, until then: the plan alone decides when and for whom."""
    state = world([use(uid) for uid in uids])
    now, tried = 0.0, []
    while now < until:
        step = plan_volume(state, NAME, now)
        if step.action is None:
            now = step.look_again_at
            continue
        tried.append(step.action.use.pod.uid)
        state.actual.setdefault(NAME, ActualVolume(NAME, SOURCE))
        if not refuses(tried[-1]):
            break
        settle(state, step.action, StepOutcome(StepFailure.FINAL, "device", "no"), now)
    return tried


@pytest.mark.parametrize("count", [1, 10])
def test_a_stage_that_fails_is_tried_as_often_for_many_pods_as_for_one(count):
    assert len(failed_stages([PodUid(f"pod-{number}") for number in range(count)], until=60.0)) == 7


def test_where_a_stage_fails_for_one_pod_only_another_has_its_turn():
    assert failed_stages([ONE, TWO], 60.0, refuses=lambda uid: uid == ONE) == [ONE, TWO]


def test_a_stage_that_succeeds_holds_nobody_up_any_more():
    state = world([use(ONE), use(TWO)])
    state.actual[NAME] = ActualVolume(NAME, SOURCE)
    settle(state, MountVolume(use(ONE)), StepOutcome(StepFailure.UNCERTAIN, "device", "no"), now=0.0)
    assert (state.actual[NAME].reason_against(ONE), state.actual[NAME].reason_against(TWO)) == ("no", "no")
    held_up = plan_volume(state, NAME, now=0.1)
    assert (held_up.action, held_up.look_again_at) == (None, 0.5)
    settle(
        state, MountVolume(use(ONE)), StepOutcome(StepFailure.FINAL, "pod", "not for this one", staged=True), now=1.0
    )
    assert state.actual[NAME].reason_against(TWO) == ""
    assert plan_volume(state, NAME, now=1.1).action == MountVolume(use(TWO))


def test_no_back_off_is_kept_for_a_pod_that_went_during_its_mount():
    state = world([use(TWO)], [(TWO, MountState.MOUNTED)], MountState.MOUNTED)
    settle(state, MountVolume(use(ONE)), StepOutcome(StepFailure.FINAL, "pod", "no", staged=True), now=0.0)
    assert state.actual[NAME].backoffs == {}


def test_republishing_is_due_after_its_period_and_not_before():
    state = world([use(republish_s=60.0)], [(ONE, MountState.MOUNTED)], MountState.MOUNTED)
    state.actual[NAME].pods[ONE].published_at = 100.0
    early = plan_volume(state, NAME, now=120.0)
    assert (early.action, early.look_again_at) == (None, 160.0)
    assert plan_volume(state, NAME, now=160.0).action == MountVolume(use(republish_s=60.0))


@pytest.mark.parametrize(
    ("before", "outcome", "device", "pod"),
    [
        (MountState.ABSENT, StepOutcome(StepFailure.UNCERTAIN, "device"), MountState.UNCERTAIN, MountState.ABSENT),
        (MountState.ABSENT, StepOutcome(StepFailure.FINAL, "device"), MountState.ABSENT, MountState.ABSENT),
        (MountState.UNCERTAIN, StepOutcome(StepFailure.FINAL, "device"), MountState.ABSENT, MountState.ABSENT),
        (MountState.UNCERTAIN, StepOutcome(StepFailure.TRANSIENT, "device"), MountState.UNCERTAIN, MountState.ABSENT),
        (MountState.MOUNTED, StepOutcome(StepFailure.UNCERTAIN, "device"), MountState.MOUNTED, MountState.ABSENT),
        (
            MountState.ABSENT,
            StepOutcome(StepFailure.UNCERTAIN, "pod", staged=True),
            MountState.MOUNTED,
            MountState.UNCERTAIN,
        ),
        (MountState.ABSENT, StepOutcome(StepFailure.FINAL, "pod", staged=True), MountState.MOUNTED, MountState.ABSENT),
        (MountState.ABSENT, StepOutcome(staged=True, published=True), MountState.MOUNTED, MountState.MOUNTED),
    ],
)
def test_what_a_mount_may_leave_behind(before, outcome, device, pod):
    state = world([use()], device=before)
    state.actual.setdefault(NAME, ActualVolume(NAME, SOURCE))
    settle(state, MountVolume(use()), outcome, now=5.0)
    assert (state.actual[NAME].device, state.actual[NAME].state_of(ONE)) == (device, pod)


def test_a_refused_device_that_was_found_on_disk_stays_uncertain():
    state = world([use()], device=MountState.UNCERTAIN)
    state.actual[NAME].device_is_reconstructed = True
    settle(state, MountVolume(use()), StepOutcome(StepFailure.FINAL, "device"), now=5.0)
    assert state.actual[NAME].device is MountState.UNCERTAIN


def test_a_failed_republish_leaves_the_mount_and_waits_its_turn():
    state = world([use(republish_s=60.0)], [(ONE, MountState.MOUNTED)], MountState.MOUNTED)
    settle(state, MountVolume(use(republish_s=60.0)), StepOutcome(StepFailure.FINAL, "pod", staged=True), now=500.0)
    assert state.actual[NAME].state_of(ONE) is MountState.MOUNTED
    assert plan_volume(state, NAME, now=501.0).action is None


@pytest.mark.parametrize("failure", list(StepFailure))
def test_any_failure_to_take_something_away_leaves_it_uncertain(failure):
    state = world([], [(ONE, MountState.MOUNTED)], MountState.MOUNTED)
    settle(state, UnmountVolume(NAME, ONE), StepOutcome(failure, "pod"), now=0.0)
    assert state.actual[NAME].state_of(ONE) is MountState.UNCERTAIN
    assert plan_volume(state, NAME, now=0.1).action is None  # not before its time, and the device waits
    assert plan_volume(state, NAME, now=1.0).action == UnmountVolume(NAME, ONE)
    bare = world([], [], MountState.MOUNTED)
    settle(bare, UnmountDevice(NAME), StepOutcome(failure, "device"), now=0.0)
    assert bare.actual[NAME].device is MountState.UNCERTAIN
    assert not plan_volume(bare, NAME, now=0.1).forget
    assert plan_volume(bare, NAME, now=1.0).action == UnmountDevice(NAME)


def test_a_new_pod_gets_what_could_not_be_taken_away_confirmed():
    state = world([use(TWO)], [(ONE, MountState.UNCERTAIN)], MountState.UNCERTAIN)
    state.actual[NAME].backoffs[("unmount", ONE)] = VolumeBackoff(3, 50.0)
    assert plan_volume(state, NAME, now=10.0).action == MountVolume(use(TWO))


@pytest.mark.parametrize(
    ("known", "left"),
    [
        ({"is_reconstructed": True}, MountState.UNCERTAIN),
        ({"published_at": 3.0}, MountState.UNCERTAIN),
        ({}, MountState.ABSENT),
    ],
    ids=["found on disk", "mounted before", "never mounted"],
)
def test_a_refused_mount_is_gone_unless_processes_may_have_it(known, left):
    state = world([use()], [(ONE, MountState.UNCERTAIN)], MountState.MOUNTED)
    state.actual[NAME].pods[ONE] = ActualPod(MountState.UNCERTAIN, **known)
    settle(state, MountVolume(use()), StepOutcome(StepFailure.FINAL, "pod", staged=True), now=5.0)
    assert state.actual[NAME].state_of(ONE) is left


def test_what_a_driver_has_confirmed_is_no_longer_a_find():
    state = world([use()], [(ONE, MountState.UNCERTAIN)], MountState.UNCERTAIN)
    volume = state.actual[NAME]
    volume.device_is_reconstructed = volume.pods[ONE].is_reconstructed = True
    settle(state, MountVolume(use()), StepOutcome(staged=True, published=True), now=5.0)
    assert not volume.device_is_reconstructed
    assert not volume.pods[ONE].is_reconstructed
    taken = world([], [], MountState.UNCERTAIN)
    taken.actual[NAME].device_is_reconstructed = True
    settle(taken, UnmountDevice(NAME), StepOutcome(StepFailure.UNCERTAIN, "device"), now=5.0)
    assert taken.actual[NAME].device_is_reconstructed
    settle(taken, UnmountDevice(NAME), StepOutcome(), now=5.0)
    assert not taken.actual[NAME].device_is_reconstructed


@pytest.mark.parametrize("kind", [MountVolume, Expand])
def test_a_volume_that_cannot_grow_in_use_is_not_asked_again(kind):
    wanted = use(size_bytes=20, claim_size_bytes=10)
    state = world([wanted], [(ONE, MountState.MOUNTED)], MountState.MOUNTED)
    settle(state, kind(wanted), StepOutcome(staged=True, published=True, growth_refused=True), now=5.0)
    assert plan_volume(state, NAME, now=500.0).action is None


@pytest.mark.parametrize("changed", [{"claim_expands": False}, {"claim_size_bytes": 0}, {"size_bytes": 10}])
def test_nothing_grows_without_both_sizes_and_the_controllers_leave(changed):
    wanted = use(**{"size_bytes": 20, "claim_size_bytes": 10, **changed})
    assert plan_volume(world([wanted], [(ONE, MountState.MOUNTED)], MountState.MOUNTED), NAME, now=0.0).action is None


def test_read_write_once_pod_beside_other_modes_is_for_many_pods():
    mixed = CsiSource("driver", "vol", "pv", access_modes=("ReadWriteOncePod", "ReadWriteOnce"))
    state = world([use(ONE, source=mixed), use(TWO, source=mixed)], [(ONE, MountState.MOUNTED)], MountState.MOUNTED)
    assert plan_volume(state, NAME, now=10.0).action == MountVolume(use(TWO, source=mixed))


@pytest.mark.parametrize("device", [MountState.MOUNTED, MountState.UNCERTAIN])
def test_no_device_goes_before_all_is_known(device):
    assert plan_volume(world([], [], device, is_ready=False), NAME, now=0.0).action is None


def test_failures_are_spaced_further_and_further_and_success_forgets_them():
    state = world([use()], device=MountState.ABSENT)
    state.actual[NAME] = ActualVolume(NAME, SOURCE)
    now, delays = 0.0, []
    for _ in range(12):
        settle(state, MountVolume(use()), StepOutcome(StepFailure.TRANSIENT, "device"), now)
        delays.append(state.actual[NAME].backoffs[("mount", ONE)].until - now)
    assert delays[:3] == [0.5, 1.0, 2.0]
    assert max(delays) == 122.0
    settle(state, MountVolume(use()), StepOutcome(staged=True, published=True), now)
    assert not state.actual[NAME].backoffs


def test_in_use_lists_what_is_desired_or_possibly_here_and_only_attachable_volumes():
    attachable = world([use(is_attachable=True)])
    assert attachable.in_use() == {NAME}
    assert world([use(is_attachable=False)]).in_use() == frozenset()
    assert world([], [(ONE, MountState.UNCERTAIN)]).in_use() == {NAME}
    known_not = world([use(is_attachable=False)], [(ONE, MountState.MOUNTED)], MountState.MOUNTED)
    assert known_not.in_use() == frozenset()
    inline = world()
    inline.actual[NAME] = ActualVolume(NAME, replace(SOURCE, is_ephemeral=True))
    assert inline.in_use() == frozenset()


def labelled(uses, pods=(), device=MountState.ABSENT):
    """What is there was mounted with label a."""
    state = world(uses, pods, device)
    if NAME in state.actual:
        state.actual[NAME].se_linux_label = "a"
    return state


ONE_A, ONE_B = use(ONE, se_linux_label="a"), use(ONE, se_linux_label="b")
TWO_A, TWO_B = use(TWO, se_linux_label="a"), use(TWO, se_linux_label="b")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(
            labelled([ONE_A, TWO_A], [(ONE, MountState.MOUNTED)], MountState.MOUNTED),
            MountVolume(TWO_A),
            id="the same label is shared",
        ),
        pytest.param(
            labelled([ONE_A, TWO_B], [(ONE, MountState.MOUNTED)], MountState.MOUNTED),
            None,
            id="another label waits for the pod",
        ),
        pytest.param(
            labelled([TWO_B], [(ONE, MountState.UNCERTAIN)], MountState.MOUNTED),
            UnmountVolume(NAME, ONE),
            id="which goes first",
        ),
        pytest.param(labelled([TWO_B], [], MountState.MOUNTED), UnmountDevice(NAME), id="then the device goes"),
        pytest.param(labelled([TWO_B], [], MountState.UNCERTAIN), UnmountDevice(NAME), id="even if uncertain"),
        pytest.param(labelled([TWO_B]), MountVolume(TWO_B), id="then it comes"),
        pytest.param(
            labelled([ONE_A, TWO_B], [], MountState.MOUNTED),
            MountVolume(ONE_A),
            id="the device stays for a pod that wants its label",
        ),
        pytest.param(
            labelled([ONE_B], [(ONE, MountState.UNCERTAIN)], MountState.UNCERTAIN),
            MountVolume(ONE_B),
            id="a pod never waits for itself",
        ),
    ],
)
def test_a_volume_has_one_label_at_a_time(state, expected):
    step = plan_volume(state, NAME, now=100.0)
    assert step.action == expected
    if expected is None:
        assert "SELinux label a, and this pod needs b" in step.waiting[TWO]


def test_the_label_is_the_one_it_was_mounted_with_last():
    state = world([use(se_linux_label="b")])
    state.actual[NAME] = ActualVolume(NAME, SOURCE, se_linux_label="a")
    settle(state, MountVolume(use(se_linux_label="b")), StepOutcome(staged=True, published=True), now=5.0)
    assert state.actual[NAME].se_linux_label == "b"
