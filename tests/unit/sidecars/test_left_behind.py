"""When another instance's note counts as left behind: never while its writer renews it, always some time after."""

import pytest

from moorage.sidecars.provisioner.abandoned_intents import Intent, OtherIntents


class Time:
    """A wall clock and a timer that go on only when told."""

    def __init__(self):
        self.now = 1000.0
        self.wall_ahead_by = 1_700_000_000.0

    def timer(self):
        return self.now

    def clock(self):
        return self.now + self.wall_ahead_by


@pytest.fixture
def time():
    return Time()


def others(time, patience_s=300.0):
    return OtherIntents(patience_s, clock=time.clock, timer=time.timer)


def note(time, key="u1.a", slow_by=0.0):
    return Intent(key, f"{time.clock() - slow_by:.3f}:attempt")


def see(watcher, *notes):
    watcher.see({each.key: each.text for each in notes})


def test_a_note_that_stays_the_same_is_left_behind_after_the_patience_and_not_before(time):
    watcher, left = others(time), note(time)
    see(watcher, left)
    time.now += 299.9
    see(watcher, left)
    assert watcher.abandoned() == []
    time.now += 0.1
    assert watcher.abandoned() == [left]
    assert left.uid == "u1"


def test_a_note_that_is_renewed_is_never_left_behind(time):
    watcher = others(time)
    for _ in range(50):
        see(watcher, note(time))
        time.now += 290.0
        assert watcher.abandoned() == []


def test_each_note_has_its_own_age_and_one_that_came_back_is_new(time):
    watcher, first, second = others(time), note(time, "u1.a"), note(time, "u2.a")
    see(watcher, first)
    time.now += 200.0
    see(watcher, first, second)
    time.now += 100.0
    assert watcher.abandoned() == [first]
    see(watcher, second)
    see(watcher, first, second)
    assert watcher.abandoned() == []


@pytest.mark.parametrize(("slow_by", "expected"), [(0, 0), (-3600, 0), (599, 0), (601, 1), (86400, 1)])
def test_clocks_of_machines_may_differ_by_nearly_twice_the_patience(time, slow_by, expected):
    watcher = others(time)
    see(watcher, note(time, slow_by=slow_by))
    assert len(watcher.abandoned()) == expected


def test_without_another_living_instance_every_note_is_left_behind(time):
    watcher = others(time, patience_s=0.0)
    found = [note(time), note(time, "u2.a", slow_by=-3600), Intent("u3.a", "no time at all")]
    see(watcher, *found)
    assert watcher.abandoned() == found


def test_a_note_of_another_version_is_left_behind_too_when_nobody_changes_it(time):
    watcher, strange = others(time), Intent("u1.a", "what is this")
    see(watcher, strange)
    assert watcher.abandoned() == []
    time.now += 300.0
    assert watcher.abandoned() == [strange]
