"""Random pods, random failures, random crashes: the plan never breaks a rule and always arrives.

The driver and the disk are small models with behaviour: a call may fail before or after its effect, an answer may be
lost, the agent may die at any point and start again from what is on disk.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moorage.kube.volumes import VolumeName
from moorage.node.layout import PodUid
from moorage.node.volumes.plan import plan_volume
from moorage.node.volumes.state import (
    ActualPod,
    ActualVolume,
    CsiSource,
    MountState,
    MountVolume,
    PodRef,
    StepFailure,
    StepOutcome,
    UnmountDevice,
    UnmountVolume,
    VolumeState,
    VolumeUse,
    settle,
)

VOLUMES = [VolumeName(f"kubernetes.io/csi/d^v{n}") for n in range(2)]
PODS = [PodUid(f"p{n}") for n in range(3)]


def wanted(volume, uid):
    source = CsiSource("d", volume[-2:], f"pv-{volume[-2:]}", access_modes=("ReadWriteOnce",))
    return VolumeUse(volume, PodRef(uid, "ns", uid), source, ("data",))


@dataclass
class Machine:
    """What survives a crash of the agent: mounts, and the files written before each call."""

    staged: set = field(default_factory=set)
    published: set = field(default_factory=set)
    staged_data: set = field(default_factory=set)
    pod_data: set = field(default_factory=set)
    broken_rules: list = field(default_factory=list)

    def stage(self, volume):
        self.staged.add(volume)

    def publish(self, volume, uid):
        if volume not in self.staged:
            self.broken_rules.append(f"{volume} published for {uid} without being staged")
        self.published.add((volume, uid))

    def unstage(self, volume):
        holders = [uid for one, uid in self.published if one == volume]
        if holders:
            self.broken_rules.append(f"{volume} unstaged while {holders} have it")
        self.staged.discard(volume)


class Agent(RuleBasedStateMachine):
    """The agent against the model."""

    def __init__(self):
        super().__init__()
        self.disk = Machine()
        self.world = VolumeState(is_ready=True)
        self.now = 0.0
        self.running_pods = set()
        self.flights = []  # actions under way

    @rule(volume=st.sampled_from(VOLUMES), uid=st.sampled_from(PODS))
    def a_pod_wants_a_volume(self, volume, uid):
        self.world.desired.setdefault(volume, {})[uid] = wanted(volume, uid)

    @precondition(lambda self: self.world.desired)
    @rule(data=st.data())
    def a_pod_no_longer_wants_it(self, data):
        wants = sorted((volume, uid) for volume, uses in self.world.desired.items() for uid in uses)
        volume, uid = data.draw(st.sampled_from(wants))
        uses = self.world.desired[volume]
        del uses[uid]
        if not uses:
            del self.world.desired[volume]

    @rule()
    def steps_are_planned(self):
        for volume in VOLUMES:
            self._plan(volume)

    def _plan(self, volume):
        step = plan_volume(self.world, volume, self.now)
        if step.forget:
            del self.world.actual[volume]
        if step.action is None:
            return
        actual = self.world.actual.setdefault(volume, ActualVolume(volume, wanted(volume, PODS[0]).source))
        assert actual.pending is None
        actual.pending = step.action
        self.flights.append(step.action)

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), effect=st.booleans(), answer=st.sampled_from(["ok", "uncertain", "final", "transient"]))
    def a_step_ends(self, data, effect, answer):
        action = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self._finish(action, effect, answer)

    @precondition(lambda self: self.flights)
    @rule()
    def all_steps_end_well(self):
        """Or the end of a volume would seldom be seen."""
        for action in self.flights:
            self._finish(action, True, "ok")
        self.flights.clear()

    def _finish(self, action, effect, answer):
        match action:
            case MountVolume(use):
                outcome = self._mount(use, effect, answer)
            case UnmountVolume(volume, uid):
                outcome = self._unmount(volume, uid, effect, answer)
            case UnmountDevice(volume):
                if effect or answer == "ok":
                    self.disk.unstage(volume)
                if answer == "ok":
                    self.disk.staged_data.discard(volume)
                outcome = StepOutcome() if answer == "ok" else StepOutcome(StepFailure.UNCERTAIN, "device")
        settle(self.world, action, outcome, self.now)

    def _mount(self, use, effect, answer):
        volume, uid = use.volume, use.pod.uid
        actual = self.world.actual[volume]
        if answer == "transient":
            return StepOutcome(StepFailure.TRANSIENT, "device")
        if actual.device is not MountState.MOUNTED:
            self.disk.staged_data.add(volume)
            if effect or answer == "ok":
                self.disk.stage(volume)
            if answer == "uncertain":
                return StepOutcome(StepFailure.UNCERTAIN, "device")
            if answer == "final":
                # Something is mounted nevertheless: the executor does not believe the refusal.
                if volume in self.disk.staged:
                    return StepOutcome(StepFailure.UNCERTAIN, "device")
                if not actual.device_is_reconstructed:
                    self.disk.staged_data.discard(volume)
                return StepOutcome(StepFailure.FINAL, "device")
        self.disk.pod_data.add((volume, uid))
        if effect or answer == "ok":
            self.disk.publish(volume, uid)
        if answer == "uncertain":
            return StepOutcome(StepFailure.UNCERTAIN, "pod", staged=True)
        if answer == "final":
            known = actual.pods.get(uid)
            if (volume, uid) in self.disk.published:
                return StepOutcome(StepFailure.UNCERTAIN, "pod", staged=True)
            if known is None or not known.may_be_used:
                self.disk.pod_data.discard((volume, uid))
            return StepOutcome(StepFailure.FINAL, "pod", staged=True)
        return StepOutcome(staged=True, published=True)

    def _unmount(self, volume, uid, effect, answer):
        if effect or answer == "ok":
            self.disk.published.discard((volume, uid))
        if answer != "ok":
            return StepOutcome(StepFailure.UNCERTAIN, "pod")
        self.disk.pod_data.discard((volume, uid))
        return StepOutcome()

    @rule(effects=st.lists(st.booleans(), min_size=8, max_size=8))
    def the_agent_dies_and_starts_again(self, effects):
        for action, effect in zip(self.flights, effects, strict=False):
            if effect:  # the driver finishes what it was asked, with nobody to hear it
                self._finish(action, True, "uncertain")
        self.flights.clear()
        desired = self.world.desired
        self.world = VolumeState(desired=desired, is_ready=True)
        for volume in self.disk.staged_data | {one for one, _ in self.disk.pod_data}:
            actual = ActualVolume(volume, wanted(volume, PODS[0]).source, device=MountState.UNCERTAIN)
            actual.device_is_reconstructed = True
            self.world.actual[volume] = actual
        for volume, uid in self.disk.pod_data:
            self.world.actual[volume].pods[uid] = ActualPod(MountState.UNCERTAIN, is_reconstructed=True)

    @rule(seconds=st.floats(0.1, 200.0))
    def time_passes(self, seconds):
        self.now += seconds

    @invariant()
    def no_rule_is_ever_broken(self):
        assert self.disk.broken_rules == []

    @invariant()
    def nothing_mounted_is_unknown(self):
        for volume, uid in self.disk.published:
            under_way = any(isinstance(one, MountVolume) and one.use.volume == volume for one in self.flights)
            known = self.world.actual.get(volume)
            assert (volume, uid) in self.disk.pod_data
            assert under_way or (known is not None and known.state_of(uid) is not MountState.ABSENT)
        for volume in self.disk.staged:
            assert volume in self.disk.staged_data or any(one == volume for one, _ in self.disk.pod_data)
            assert volume in self.world.actual

    def teardown(self):
        """Left in peace, the agent arrives where it should be."""
        for _ in range(60):
            for action in list(self.flights):
                self.flights.remove(action)
                self._finish(action, True, "ok")
            self.now += 200.0
            for volume in VOLUMES:
                self._plan(volume)
        assert not self.flights
        expected = {(volume, uid) for volume, uses in self.world.desired.items() for uid in uses}
        assert self.disk.published == expected
        assert self.disk.staged == {volume for volume, _ in expected}
        assert self.disk.broken_rules == []


TestAgentSurvivesAnything = Agent.TestCase
TestAgentSurvivesAnything.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
