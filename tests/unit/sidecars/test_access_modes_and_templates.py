"""Access modes as CSI has them, and secret references written as templates."""

import pytest

from moorage.csi import csi_pb2 as pb
from moorage.csi.access_modes import capabilities_per_mode, capability_of, mode_of
from moorage.csi.errors import InvalidAccessModes
from moorage.sidecars import templates
from moorage.sidecars.errors import BadParameters

RWO, RWX, ROX, RWOP = "ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"
NAME = pb.VolumeCapability.AccessMode.Mode.Name


@pytest.mark.parametrize(
    ("modes", "plain", "fine"),
    [
        ([RWO], "SINGLE_NODE_WRITER", "SINGLE_NODE_MULTI_WRITER"),
        ([RWOP], "SINGLE_NODE_WRITER", "SINGLE_NODE_SINGLE_WRITER"),
        ([RWX], "MULTI_NODE_MULTI_WRITER", "MULTI_NODE_MULTI_WRITER"),
        ([ROX], "MULTI_NODE_READER_ONLY", "MULTI_NODE_READER_ONLY"),
        ([RWO, RWX], "MULTI_NODE_MULTI_WRITER", "MULTI_NODE_MULTI_WRITER"),
        ([ROX, RWX, RWO], "MULTI_NODE_MULTI_WRITER", "MULTI_NODE_MULTI_WRITER"),
    ],
)
def test_a_set_of_modes_has_one_csi_mode(modes, plain, fine):
    assert NAME(mode_of(modes, False)) == plain
    assert NAME(mode_of(modes, True)) == fine


@pytest.mark.parametrize("modes", [[ROX, RWO], [RWOP, RWO], [], ["Sometimes"]])
def test_sets_without_a_csi_mode_are_refused(modes):
    with pytest.raises(InvalidAccessModes):
        mode_of(modes, False)


def test_a_claim_gets_one_capability_per_mode_and_a_volume_one_for_all():
    found = capabilities_per_mode([ROX, RWO], False, "xfs", ["ro"], False)
    assert [NAME(c.access_mode.mode) for c in found] == ["MULTI_NODE_READER_ONLY", "SINGLE_NODE_WRITER"]
    assert found[0].mount.fs_type == "xfs"
    with pytest.raises(InvalidAccessModes):
        capabilities_per_mode([RWOP, RWO], False, "", [], False)
    assert capability_of([RWO], True, "ext4", [], False).HasField("block")


TOKENS = {"pvc.name": "data", "pvc.namespace": "prod", "pvc.annotations['a/b']": "x1"}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("plain", "plain"),
        ("${pvc.name}-key", "data-key"),
        ("${pvc.annotations['a/b']}", "x1"),
        ("${pvc.namespace}.${pvc.name}", "prod.data"),
    ],
)
def test_templates_are_expanded(template, text):
    assert templates.expand(template, TOKENS) == text


@pytest.mark.parametrize("template", ["${nobody}", "$nobody", "$$", "${}"])
def test_unknown_tokens_are_named(template):
    with pytest.raises(BadParameters, match="unknown tokens"):
        templates.expand(template, TOKENS)


def test_a_pair_is_whole_or_absent_and_old_and_new_do_not_mix():
    keys = templates.PROVISION
    assert templates.reference_from({}, keys, TOKENS, TOKENS) is None
    with pytest.raises(BadParameters, match="must both be set"):
        templates.reference_from({keys.name: "a"}, keys, TOKENS, TOKENS)
    both = {keys.name: "a", keys.namespace: "b", keys.old_name: "c", keys.old_namespace: "d"}
    with pytest.raises(BadParameters, match="deprecated"):
        templates.reference_from(both, keys, TOKENS, TOKENS)
    fallback = {templates.DEFAULT.name: "all", templates.DEFAULT.namespace: "ns"}
    found = templates.reference_from(fallback, keys, TOKENS, TOKENS, templates.DEFAULT)
    assert (found.name, found.namespace) == ("all", "ns")


@pytest.mark.parametrize(("name", "namespace"), [("Upper", "ns"), ("ok", "two.parts"), ("-x", "ns")])
def test_what_comes_out_must_be_a_name(name, namespace):
    keys = templates.NODE_STAGE
    with pytest.raises(BadParameters):
        templates.reference_from({keys.name: name, keys.namespace: namespace}, keys, {}, {})
