"""The rules of attaching and detaching: worlds in, actions out."""

import pytest

from moorage.controllers.attachdetach.plan import (
    Attach,
    AttachLimits,
    AwaitUnmount,
    Detach,
    GiveUp,
    Keep,
    Verify,
    Warn,
    Withdraw,
    plan,
)
from moorage.controllers.attachdetach.state import AttachPhase, AttachState
from moorage.kube.objects.meta import ObjectReference
from moorage.kube.volumes import NodeName, csi_volume_name

VOLUME = csi_volume_name("csi.example.com", "v1")
A, B = NodeName("a"), NodeName("b")
NOW = 1000.0


def world_with(*nodes: NodeName, shareable: bool = False) -> AttachState:
    world = AttachState()
    for name in nodes:
        node = world.node(name)
        node.exists = node.is_managed = node.is_ready = True
    world.volume(VOLUME).pv_name = "pv-1"
    world.volume(VOLUME).is_shareable = shareable
    return world


def wanted(world: AttachState, node: NodeName, uid: str = "") -> None:
    world.want(uid or f"uid-{node}", ObjectReference(namespace="default", name=f"pod-{node}"), node, VOLUME)


def attached(world: AttachState, node: NodeName, *, listed: bool = True, in_use: bool = False) -> None:
    world.found_attached(VOLUME, node)
    world.nodes[node].listed = frozenset({VOLUME}) if listed else frozenset()
    world.nodes[node].in_use = frozenset({VOLUME}) if in_use else frozenset()


def planned(world: AttachState, now: float = NOW, limits: AttachLimits | None = None) -> list[object]:
    return list(plan(world, [VOLUME], limits or AttachLimits(), now))


def test_a_wanted_volume_is_attached():
    world = world_with(A)
    wanted(world, A)
    assert planned(world) == [Attach(VOLUME, A)]


def test_nothing_is_done_about_what_is_as_it_should_be():
    world = world_with(A)
    wanted(world, A)
    attached(world, A)
    assert planned(world) == []


def test_of_two_nodes_that_want_an_unshared_volume_the_first_gets_it():
    world = world_with(A, B)
    wanted(world, B)
    wanted(world, A)
    assert planned(world) == [Attach(VOLUME, B)]


def test_a_shared_volume_goes_to_all_its_nodes():
    world = world_with(A, B, shareable=True)
    wanted(world, A)
    wanted(world, B)
    assert planned(world) == [Attach(VOLUME, A), Attach(VOLUME, B)]


def test_a_second_node_is_told_to_wait_once():
    world = world_with(A, B)
    wanted(world, A)
    attached(world, A, in_use=True)
    wanted(world, B)
    assert planned(world) == [Warn(VOLUME, B, (A,))]
    world.volumes[VOLUME].wanted[B].was_warned = True
    assert planned(world) == []


@pytest.mark.parametrize(
    "state", [AttachPhase.ATTACHING, AttachPhase.UNCERTAIN, AttachPhase.LEAVING, AttachPhase.DETACHING]
)
def test_any_trace_on_another_node_blocks_an_unshared_volume(state):
    world = world_with(A, B)
    wanted(world, A)
    attached(world, A)
    world.volumes[VOLUME].attachments[A].state = state
    world.volumes[VOLUME].attachments[A].deadline = NOW + 10
    wanted(world, B)
    assert Attach(VOLUME, B) not in planned(world)


def test_detaching_first_takes_the_volume_off_the_nodes_list():
    world = world_with(A)
    attached(world, A)
    assert planned(world) == [AwaitUnmount(VOLUME, A), Withdraw(VOLUME, A)]
    world.leave(VOLUME, A)
    world.volumes[VOLUME].attachments[A].detach_wanted_at = NOW
    assert planned(world) == []  # still listed
    world.nodes[A].listed = frozenset()
    assert planned(world) == [Detach(VOLUME, A, verify=True)]


def test_a_volume_in_use_stays_on_a_healthy_node_for_ever():
    world = world_with(A)
    attached(world, A, in_use=True)
    world.volumes[VOLUME].attachments[A].detach_wanted_at = 0.0
    assert planned(world, now=100_000.0) == []


def test_a_silent_node_is_overruled_after_six_minutes_and_not_before():
    world = world_with(A)
    attached(world, A, listed=False, in_use=True)
    world.nodes[A].is_ready = False
    world.volumes[VOLUME].attachments[A].detach_wanted_at = NOW
    assert planned(world, now=NOW + 360) == []
    assert planned(world, now=NOW + 360.01) == [Detach(VOLUME, A, verify=False)]
    assert planned(world, now=NOW + 360.01, limits=AttachLimits(may_force=False)) == []


def test_a_healthy_node_that_let_go_late_is_not_asked_again():
    world = world_with(A)
    attached(world, A, listed=False)
    world.volumes[VOLUME].attachments[A].detach_wanted_at = NOW
    assert planned(world, now=NOW + 360) == [Detach(VOLUME, A, verify=True)]
    assert planned(world, now=NOW + 361) == [Detach(VOLUME, A, verify=False)]
    assert planned(world, now=NOW + 361, limits=AttachLimits(may_force=False)) == [Detach(VOLUME, A, verify=True)]


def test_an_out_of_service_node_is_not_waited_for():
    world = world_with(A)
    attached(world, A, listed=False, in_use=True)
    world.nodes[A].is_out_of_service = True
    assert planned(world) == [AwaitUnmount(VOLUME, A), Detach(VOLUME, A, verify=False)]


def test_a_fresh_attachment_counts_as_mounted_until_the_node_reports():
    world = world_with(A)
    wanted(world, A)
    world.attach_begins(VOLUME, A, NOW)
    world.volumes[VOLUME].attachments[A].is_executing = False
    world.attached(VOLUME, A)
    world.unwant("uid-a")
    assert planned(world) == [AwaitUnmount(VOLUME, A)]


def test_the_clock_of_force_stops_when_the_volume_is_wanted_again():
    world = world_with(A)
    attached(world, A)
    world.volumes[VOLUME].attachments[A].detach_wanted_at = NOW - 300
    wanted(world, A)
    assert planned(world) == [Keep(VOLUME, A)]


def test_a_failed_attach_is_left_alone_longer_each_time():
    world = world_with(A)
    wanted(world, A)
    delays = []
    now = NOW
    for _ in range(11):
        assert planned(world, now) == [Attach(VOLUME, A)]
        world.attach_begins(VOLUME, A, now)
        world.volumes[VOLUME].attachments[A].is_executing = False
        world.failed(VOLUME, A, "attach", now)
        assert planned(world, now) == []
        delays.append(world.volumes[VOLUME].attachments[A].backoff.until - now)
        now = world.volumes[VOLUME].attachments[A].backoff.until
    assert delays[:3] == [0.5, 1.0, 2.0]
    assert delays[-1] == 122.0


def test_a_success_ends_what_failures_had_piled_up():
    world = world_with(A)
    wanted(world, A)
    for _ in range(3):
        world.attach_begins(VOLUME, A, NOW)
        world.failed(VOLUME, A, "attach", NOW)
    world.attached(VOLUME, A)
    world.failed(VOLUME, A, "attach", NOW)
    assert world.volumes[VOLUME].attachments[A].backoff.until == NOW + 0.5


def test_a_failed_attach_does_not_delay_taking_it_back():
    world = world_with(A)
    wanted(world, A)
    world.attach_begins(VOLUME, A, NOW)
    world.volumes[VOLUME].attachments[A].is_executing = False
    world.failed(VOLUME, A, "attach", NOW)
    world.unwant("uid-a")
    world.volumes[VOLUME].attachments[A].assumed_in_use = False  # the node has reported
    assert Detach(VOLUME, A, verify=True) in planned(world)


def test_an_attach_that_failed_is_taken_back_at_once_only_where_another_node_waits():
    world = world_with(A, B)
    wanted(world, A)
    world.attach_begins(VOLUME, A, NOW)
    world.volumes[VOLUME].attachments[A].is_executing = False
    world.failed(VOLUME, A, "attach", NOW)
    world.unwant("uid-a")
    assert planned(world) == [AwaitUnmount(VOLUME, A)]
    wanted(world, B)
    assert planned(world) == [AwaitUnmount(VOLUME, A), Detach(VOLUME, A, verify=True)]


def test_what_contradicts_an_attachment_is_believed_after_a_minute():
    world = world_with(A)
    wanted(world, A)
    attached(world, A)
    world.volumes[VOLUME].attachments[A].doubted_at = NOW
    assert planned(world, NOW + 59) == []
    assert planned(world, NOW + 60) == [Verify(VOLUME, A)]


def test_an_answer_that_never_comes_is_given_up():
    world = world_with(A)
    wanted(world, A)
    world.attach_begins(VOLUME, A, NOW)
    assert planned(world, NOW + 500) == []  # our own request is still on its way
    world.volumes[VOLUME].attachments[A].is_executing = False
    assert planned(world, NOW + 119) == []
    assert planned(world, NOW + 120) == [GiveUp(VOLUME, A)]


def test_a_world_that_is_used_up_is_empty():
    world = world_with(A)
    wanted(world, A)
    attached(world, A)
    world.unwant("uid-a")
    world.nodes[A].exists = False
    world.detached(VOLUME, A)
    assert not world.volumes
    assert not world.nodes
    assert not world.names
    assert not world.pods
