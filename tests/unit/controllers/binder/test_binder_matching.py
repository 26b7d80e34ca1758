"""Which volume a claim gets."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.controllers.binder.binder_objects import ROX, RWO, RWX, Around, claim, volume

from moorage.controllers.binder.matching import FreeVolumes, WaitingClaims, mismatch
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import capacity_bytes, requested_bytes

CASES = {
    "the smallest that fits": ([volume("a", "5Gi"), volume("b", "2Gi"), volume("c", "1Gi")], claim(size="2Gi"), "b"),
    "none is large enough": ([volume("a", "1Gi")], claim(size="2Gi"), None),
    "equal sizes go by name": ([volume("b"), volume("a")], claim(), "a"),
    "decimal is less than binary": ([volume("a", "1G"), volume("b", "1Gi")], claim(size="1Gi"), "b"),
    "fewest modes beat smallest size": (
        [volume("a", "1Gi", accessModes=[RWO, ROX]), volume("b", "9Gi", accessModes=[RWO])],
        claim(),
        "b",
    ),
    "all modes are needed": ([volume("a", accessModes=[RWO])], claim(accessModes=[RWO, RWX]), None),
    "classes must be equal": ([volume("a", storageClassName="fast")], claim(), None),
    "the old annotation is the class": (
        [volume("a", storageClassName="slow"), volume("b", storageClassName="fast")],
        claim(storageClassName="slow", notes={"volume.beta.kubernetes.io/storage-class": "fast"}),
        "b",
    ),
    "modes of use must be equal": ([volume("a", volumeMode="Block")], claim(), None),
    "no mode of use is Filesystem": ([volume("a")], claim(volumeMode="Filesystem"), "a"),
    "attributes classes must be equal": ([volume("a", volumeAttributesClassName="gold")], claim(), None),
    "a selector is heeded": (
        [volume("a"), volume("b", "2Gi", labels={"tier": "gold"})],
        claim(selector={"matchLabels": {"tier": "gold"}}),
        "b",
    ),
    "a selector that cannot be read admits nothing": (
        [volume("a", labels={"tier": "gold"})],
        claim(selector={"matchExpressions": [{"key": "tier", "operator": "Like", "values": ["g"]}]}),
        None,
    ),
    "a dying volume is not offered": ([volume("a", is_deleting=True)], claim(), None),
    "a volume must be Available": ([volume("a", phase="Pending"), volume("b", phase="Failed")], claim(), None),
    "a volume of another claim is not offered": ([volume("a", claim="other")], claim(), None),
    "a reserved volume comes first": ([volume("a"), volume("b", "9Gi", claim="claim")], claim(), "b"),
    "of two reserved volumes the smaller is taken": (
        [volume("a", "9Gi", claim="claim"), volume("b", "2Gi", claim="claim")],
        claim(),
        "b",
    ),
    "a reserved volume may have another class, selector and phase": (
        [volume("a", claim="claim", storageClassName="fast", phase="Pending")],
        claim(selector={"matchLabels": {"tier": "gold"}}),
        "a",
    ),
    "a reserved volume that is too small is not taken": ([volume("a", claim="claim")], claim(size="2Gi"), None),
    "a volume reserved for an older claim of the name is not taken": (
        [volume("a", claim="claim", claim_uid="older")],
        claim(),
        None,
    ),
    "a free volume with fewer modes beats a reserved one": (
        [volume("a", claim="claim", accessModes=[RWO, RWX]), volume("b")],
        claim(),
        "b",
    ),
    "a volume without a size fits nothing": ([volume("a", capacity={})], claim(), None),
    "a size that cannot be read is none": ([volume("a", "lots")], claim(), None),
}


@pytest.mark.parametrize(("volumes", "wanted", "expected"), CASES.values(), ids=CASES)
def test_the_volume_that_a_claim_gets(
    volumes: list[PersistentVolume], wanted: PersistentVolumeClaim, expected: str | None
) -> None:
    found = Around(volumes).best_volume(wanted, only_reserved=False)
    assert (found.name if found is not None else None) == expected


def test_only_reserved_volumes_are_found_when_the_scheduler_is_to_choose() -> None:
    around = Around([volume("a"), volume("b", claim="claim")])
    found = around.best_volume(claim(), only_reserved=True)
    assert found is not None
    assert found.name == "b"
    assert around.best_volume(claim("other"), only_reserved=True) is None


def test_a_volume_that_is_being_given_away_is_not_offered_again_until_it_is_seen() -> None:
    around = Around([volume("a")])
    around.free.take("a")
    assert around.best_volume(claim(), only_reserved=False) is None
    around.free.see(volume("a"), volume("a"))
    assert around.best_volume(claim(), only_reserved=False) is not None


@pytest.mark.parametrize(
    ("named", "wanted", "why"),
    [
        (volume(), claim(), ""),
        (volume(), claim(selector={"matchLabels": {"tier": "gold"}}), ""),
        (volume(is_deleting=True), claim(), "deletion"),
        (volume(), claim(size="2Gi"), "too small"),
        (volume(storageClassName="fast"), claim(), "storageClassName"),
        (volume(volumeAttributesClassName="gold"), claim(), "volumeAttributesClassName"),
        (volume(volumeMode="Block"), claim(), "volumeMode"),
        (volume(), claim(accessModes=[RWX]), "accessMode"),
    ],
)
def test_why_a_named_volume_does_not_do(named: PersistentVolume, wanted: PersistentVolumeClaim, why: str) -> None:
    assert why in mismatch(named, wanted)
    assert bool(mismatch(named, wanted)) == bool(why)


sizes = st.integers(1, 6).map(lambda size: f"{size}Gi")
modes = st.sets(st.sampled_from([RWO, ROX, RWX]), min_size=1).map(sorted)
volumes = st.builds(
    lambda number, size, modes, shelf, tier: volume(
        f"v{number}", size, accessModes=modes, storageClassName=shelf, labels={"tier": tier}
    ),
    st.integers(0, 30),
    sizes,
    modes,
    st.sampled_from(["", "fast"]),
    st.sampled_from(["gold", "tin"]),
)
claims = st.builds(
    lambda size, modes, shelf, tier: claim(
        size=size,
        accessModes=modes,
        storageClassName=shelf,
        selector={"matchLabels": {"tier": tier}} if tier else None,
    ),
    sizes,
    modes,
    st.sampled_from(["", "fast"]),
    st.sampled_from(["", "gold"]),
)


@given(st.lists(volumes, unique_by=lambda one: one.name), claims)
def test_the_index_finds_what_a_plain_search_finds(
    offered: list[PersistentVolume], wanted: PersistentVolumeClaim
) -> None:
    def fits(one: PersistentVolume) -> bool:
        is_wanted = wanted.spec.selector is None or one.labels["tier"] == "gold"
        return is_wanted and not mismatch(one, wanted)

    order = sorted(
        (one for one in offered if fits(one)),
        key=lambda one: (len(one.spec.access_modes), sorted(one.spec.access_modes), capacity_bytes(one), one.name),
    )
    found = Around(offered).best_volume(wanted, only_reserved=False)
    assert found == (order[0] if order else None)


@given(st.lists(volumes, min_size=1), st.randoms())
def test_the_index_forgets_what_it_was_told_to_forget(changes: list[PersistentVolume], chance: random.Random) -> None:
    known: dict[str, PersistentVolume] = {}
    free = FreeVolumes(lambda name: known.get(name))
    for one in changes:
        old = known.pop(one.name, None)
        if old is not None and chance.random() < 0.3:
            free.see(old, None)
            continue
        known[one.name] = one
        free.see(old, one)
    for old in list(known.values()):
        del known[old.name]
        free.see(old, None)
    assert vars(free)["_shelves"] == vars(free)["_places"] == vars(free)["_reserved"] == {}


class TestAVolumeWakesOneClaim:
    def test_the_one_that_uses_most_of_it(self) -> None:
        waiting = WaitingClaims()
        for one in (claim("small", "1Gi"), claim("fitting", "2Gi"), claim("large", "9Gi")):
            waiting.add(one)
        assert waiting.take_for(volume(size="3Gi")) == "default/fitting"
        assert waiting.take_for(volume(size="3Gi")) == "default/small"
        assert waiting.take_for(volume(size="3Gi")) is None
        assert len(waiting) == 1

    def test_the_one_that_waits_longest_of_a_size(self) -> None:
        waiting = WaitingClaims()
        for one in (claim("first"), claim("second")):
            waiting.add(one)
        assert waiting.take_for(volume()) == "default/first"

    def test_none_of_another_class_mode_or_selector(self) -> None:
        waiting = WaitingClaims()
        waiting.add(claim("a", storageClassName="fast"))
        waiting.add(claim("b", accessModes=[RWX]))
        waiting.add(claim("c", selector={"matchLabels": {"tier": "gold"}}))
        assert waiting.take_for(volume()) is None
        assert waiting.take_for(volume(labels={"tier": "gold"})) == "default/c"

    @given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1), st.integers(1, 5))
    def test_never_one_that_does_not_fit(self, sizes: list[tuple[int, int]], size: int) -> None:
        waiting = WaitingClaims()
        known = {}
        for request, number in sizes:
            one = claim(f"c{number}", f"{request}Gi")
            known[one.key] = one
            waiting.add(one)
        fitting = sum(requested_bytes(one) <= size << 30 for one in known.values())
        taken = []
        while (key := waiting.take_for(volume(size=f"{size}Gi"))) is not None:
            taken.append(key)
        assert len(taken) == len(set(taken)) == fitting
