"""Random lives of pods: what must hold whatever its containers do, and whatever the agent forgets on the way."""

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from moorage.kube.objects.pods import Pod
from moorage.node.pods.lifecycle import ContainerAttempt, decide, first_to_end, is_sidecar, next_streak
from moorage.node.pods.status_report import status_of


@st.composite
def pods(draw):
    kinds = draw(st.lists(st.sampled_from(["init", "sidecar"]), max_size=3))
    init = [
        {"name": f"i{number}", "image": "host", **({"restartPolicy": "Always"} if kind == "sidecar" else {})}
        for number, kind in enumerate(kinds)
    ]
    main = [{"name": f"c{number}", "image": "host"} for number in range(draw(st.integers(1, 3)))]
    policy = draw(st.sampled_from(["Always", "OnFailure", "Never"]))
    metadata = {"name": "p", "namespace": "ns", "uid": "u"}
    spec = {"restartPolicy": policy, "initContainers": init, "containers": main}
    return msgspec.convert({"metadata": metadata, "spec": spec}, Pod)


class Life:
    """A pod's containers as the agent would run them, with every rule checked at each step."""

    def __init__(self, pod):
        self.pod, self.now, self.attempts = pod, 1000.0, {}
        self.starts = []
        self.phases = []
        self.last = None

    def step(self):
        decision = decide(self.pod, self.attempts, self.now)
        for name in decision.start:
            self._start(name)
        if not decision.is_over:
            decision = decide(self.pod, self.attempts, self.now)
        self._report(decision)
        return decision

    def _start(self, name):
        before = self.attempts.get(name)
        assert before is None or not before.is_running
        spec = {one.name: one for one in (*self.pod.spec.init_containers, *self.pod.spec.containers)}[name]
        policy = spec.restart_policy or self.pod.spec.restart_policy
        if before is not None:
            assert policy == "Always" or (policy == "OnFailure" and before.exit_code != 0) or self._is_init(name)
            assert not (policy == "Never" and not is_sidecar(spec))
        if name not in self.attempts:  # for the first time, all that comes earlier is there
            for one in self.pod.spec.init_containers:
                if one.name == name:
                    break
                known = self.attempts[one.name]
                assert known.is_running if is_sidecar(one) else known.exit_code == 0
        number = before.number + 1 if before else 0
        self.attempts[name] = ContainerAttempt(
            number, is_running=True, started=self.now, streak=next_streak(before), id=f"u-{name}-{number}",
            previous=replace(before, previous=None) if before else None,
        )  # fmt: skip
        self.starts.append(name)

    def _is_init(self, name):
        return any(one.name == name for one in self.pod.spec.init_containers)

    def end(self, name, code):
        self.attempts[name] = replace(self.attempts[name], is_running=False, finished=self.now, exit_code=code)

    def _report(self, decision):
        status = status_of(self.pod, self.attempts, decision, host_ip="h", started_at=0.0, now=self.now)
        order = ["Pending", "Running", "Succeeded", "Failed"]
        if self.phases:
            assert order.index(status["phase"]) >= order.index(self.phases[-1])
        self.phases.append(status["phase"])
        every = {one["name"]: one for one in (*status.get("initContainerStatuses", []), *status["containerStatuses"])}
        for name, one in every.items():
            assert len(one["state"]) == 1
            assert one["ready"] <= (
                "running" in one["state"] or one["state"].get("terminated", {}).get("exitCode") == 0
            )
            if self.last and "terminated" in self.last[name]["state"] and "terminated" not in one["state"]:
                # An API server refuses this for a container that is not to be started again.
                ended = self.last[name]["state"]["terminated"]["exitCode"]
                assert self.pod.spec.restart_policy != "Never" or name in self._sidecars()
                assert self.pod.spec.restart_policy == "Always" or ended != 0 or name in self._sidecars()
        self.last = every

    def _sidecars(self):
        return {one.name for one in self.pod.spec.init_containers if is_sidecar(one)}

    def running(self):
        return sorted(name for name, one in self.attempts.items() if one.is_running)


@given(pods(), st.data())
def test_a_pod_keeps_its_rules_through_any_life(pod, data):
    life = Life(pod)
    for _ in range(data.draw(st.integers(1, 25))):
        decision = life.step()
        if decision.is_over:
            codes = [life.attempts[one.name].exit_code for one in pod.spec.containers if one.name in life.attempts]
            well = len(codes) == len(pod.spec.containers) and not any(codes)
            assert (decision.phase, decision.start) == ("Succeeded" if well else "Failed", ())
            return
        assert life.running() or decision.look_again_at is not None  # something will happen by itself
        life.now += data.draw(st.sampled_from([0.1, 5.0, 700.0]))
        running = life.running()
        if running and data.draw(st.booleans()):
            life.end(data.draw(st.sampled_from(running)), data.draw(st.sampled_from([0, 0, 1, 137])))


@given(pods(), st.data())
def test_everything_ends_in_its_turn(pod, data):
    names = [one.name for one in (*pod.spec.init_containers, *pod.spec.containers)]
    running = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    sidecars = {one.name for one in pod.spec.init_containers if is_sidecar(one)}
    ended = []
    while running:
        turn = first_to_end(pod, running)
        assert turn
        assert turn <= running
        ended += sorted(turn)
        running -= turn
    later = [name for name in ended if name in sidecars]
    assert ended[len(ended) - len(later) :] == later == sorted(later, reverse=True)
