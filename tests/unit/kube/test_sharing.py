"""Equal texts of cached objects are held once, and the objects still say what they said."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from moorage.kube.cache import interning
from moorage.kube.objects import PersistentVolume, PersistentVolumeClaim, Pod

TEXT = st.text("ab/.-", max_size=6)
VALUE = st.recursive(TEXT | st.integers() | st.booleans(), lambda each: st.dictionaries(TEXT, each, max_size=3))


def claim(name):
    body = {
        "metadata": {"name": name, "annotations": {"volume.kubernetes.io/storage-provisioner": "d.example"}},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "resources": {"requests": {"x": 1}}},
    }
    return msgspec.json.decode(json.dumps(body), type=PersistentVolumeClaim)


def test_what_two_objects_both_say_is_held_once():
    one, other = interning.shared(claim("one")), interning.shared(claim("other"))
    assert one.spec.storage_class_name is other.spec.storage_class_name
    assert one.spec.access_modes[0] is other.spec.access_modes[0]
    assert next(iter(one.annotations)) is next(iter(other.annotations))
    assert one.annotations is not other.annotations
    assert (one, other) == (claim("one"), claim("other"))


@given(
    labels=st.dictionaries(TEXT, TEXT, max_size=4),
    modes=st.lists(TEXT, max_size=3),
    terms=st.lists(st.fixed_dictionaries({"key": TEXT, "values": st.lists(TEXT, max_size=3)}), max_size=3),
    command=st.lists(TEXT, max_size=2),
    probe=st.dictionaries(TEXT, VALUE, max_size=3),
)
def test_nothing_that_an_object_says_is_changed(labels, modes, terms, command, probe):
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": terms}]}}
    volume = {"metadata": {"name": "v", "labels": labels}, "spec": {"accessModes": modes, "nodeAffinity": affinity}}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"command": command, "livenessProbe": probe}]}}
    for kind, body in ((PersistentVolume, volume), (Pod, pod)):
        text = json.dumps(body)
        shared = interning.shared(msgspec.json.decode(text, type=kind))
        assert shared == msgspec.json.decode(text, type=kind)
        assert msgspec.json.encode(shared) == msgspec.json.encode(msgspec.json.decode(text, type=kind))
