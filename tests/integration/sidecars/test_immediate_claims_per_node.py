"""One process per node and a claim without a node: somebody takes it soon, or the user is told soon why nobody does."""

import pytest

from moorage.kube.objects import CSINode, Node, StorageClass
from moorage.plugin.run import serve
from moorage.plugin.settings import PluginSettings
from moorage.sidecars.provisioner.ownership import rank_of
from moorage.sidecars.roles import Role
from moorage.testing import Abilities

SELECTED = "volume.kubernetes.io/selected-node"
LOCAL = Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))
CODES = [
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "INTERNAL",
    "UNKNOWN",
]
QUICK = {"node_deployment": True, "node_deployment_base_delay_s": 0.2, "node_deployment_max_delay_s": 1.0}


async def start_nodes(lab, count, **settings):
    lab.driver.topology = {"zone": "a"}
    for number in range(count):
        await lab.make_node(f"node-{number}", keys=("zone",), zone="a")
    for number in range(count):
        lab.start(Role.PROVISIONER, node=f"node-{number}", host=f"h-{number}", **(QUICK | settings))


async def told(lab, *words):
    """The event that says why, once it is there."""

    async def is_told():
        events = await lab.events("ProvisioningFailed")
        return next((e.message for e in events if all(word in e.message for word in words)), None)

    return await lab.until(is_told)


def order_of(claim, count):
    nodes = [f"node-{number}" for number in range(count)]
    return sorted(nodes, key=lambda node: rank_of(node, nodes, claim.uid))


@pytest.mark.parametrize("nodes", [1, 3])
async def test_when_no_node_has_room_the_user_is_told_how_much_there_is_and_the_claim_is_looked_at_again(
    make_lab, monkeypatch, nodes
):
    monkeypatch.setattr("moorage.sidecars.provisioner.ownership._DECLINED_S", 0.5)
    async with make_lab(LOCAL) as lab:
        lab.driver.capacity_bytes = 512 << 20
        await lab.make_class()
        await start_nodes(lab, nodes)
        await lab.make_claim("data", "1Gi")
        message = await told(lab, "no node has taken the claim")
        assert "512.0 MiB are left there, 1,024.0 MiB are asked for" in message
        assert "looked at again in" in message
        assert lab.driver.count("CreateVolume") == 0
        lab.driver.capacity_bytes = 4 << 30
        assert (await lab.bound("data")).annotations[SELECTED]


@pytest.mark.parametrize("code", CODES)
async def test_a_driver_that_cannot_tell_its_room_lets_the_next_node_go_first(make_lab, code):
    async with make_lab(LOCAL) as lab:
        lab.driver.fail("GetCapacity", code)
        await lab.make_class()
        await start_nodes(lab, 2)
        made = await lab.make_claim("data")
        claim = await lab.bound("data")
        assert claim.annotations[SELECTED] == order_of(made, 2)[1]
        assert lab.driver.count("CreateVolume") == 1


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("nodes", [1, 2])
async def test_when_no_driver_can_tell_its_room_the_claim_is_tried_and_createvolume_says_what_is_wrong(
    make_lab, code, nodes
):
    async with make_lab(LOCAL) as lab:
        lab.driver.fail("GetCapacity", code, times=1000)
        lab.driver.fail("CreateVolume", "INVALID_ARGUMENT", times=1000)
        await lab.make_class()
        await start_nodes(lab, nodes)
        await lab.make_claim("data")
        message = await told(lab, "CreateVolume: INVALID_ARGUMENT")
        assert "cannot be met as it is" in message


async def test_a_class_whose_topologies_no_node_has_is_reported(make_lab):
    async with make_lab(LOCAL) as lab:
        terms = [{"matchLabelExpressions": [{"key": "zone", "values": ["elsewhere"]}]}]
        await lab.make_class(allowedTopologies=terms)
        await start_nodes(lab, 2)
        await lab.make_claim("data")
        assert "allowedTopologies" in await told(lab, "no node has taken the claim")
        assert SELECTED not in (await lab.claim("data")).annotations
        assert lab.driver.count("GetCapacity") == 0


async def test_room_that_is_gone_when_the_volume_is_made_sends_the_claim_to_another_node(make_lab):
    async with make_lab(LOCAL) as lab:
        lab.driver.fail("CreateVolume", "RESOURCE_EXHAUSTED")
        await lab.make_class()
        await start_nodes(lab, 2)
        made = await lab.make_claim("data")
        assert "other nodes may take the claim" in await told(lab, "RESOURCE_EXHAUSTED")
        assert (await lab.bound("data")).annotations[SELECTED] == order_of(made, 2)[1]


@pytest.mark.parametrize(
    ("parameters", "size", "words"),
    [
        ({"kind": "bogus"}, "16Mi", ("INVALID_ARGUMENT", "bogus", "cannot be met as it is")),
        ({"pool": "nowhere"}, "16Mi", ("INVALID_ARGUMENT", "nowhere", "cannot be met as it is")),
        ({"unheard-of": "x"}, "16Mi", ("INVALID_ARGUMENT", "unheard-of")),
        ({"csi.storage.k8s.io/unheard-of": "x"}, "16Mi", ("reserved",)),
        ({}, "900Ti", ("no node has taken the claim", "are left there", "are asked for")),
    ],
)
async def test_the_real_plugins_refusal_reaches_the_user(make_lab, tmp_path, parameters, size, words):
    driver, key, endpoint = "csi.moorage.dev", "topology.moorage.dev/node", f"unix://{tmp_path}/csi.sock"
    pool = tmp_path / "pool"
    pool.mkdir()
    async with make_lab() as lab, serve(PluginSettings(endpoint=endpoint, node_id="node-1", pools={"default": pool})):
        node = await lab.client.create(Node, {"metadata": {"name": "node-1", "labels": {key: "node-1"}}})
        owner = {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": node.uid}
        spec = {"drivers": [{"name": driver, "nodeID": "node-1", "topologyKeys": [key]}]}
        await lab.client.create(CSINode, {"metadata": {"name": "node-1", "ownerReferences": [owner]}, "spec": spec})
        body = {"provisioner": driver, "parameters": parameters, "volumeBindingMode": "Immediate"}
        await lab.client.create(StorageClass, {"metadata": {"name": "fast"}, **body})
        lab.start(node="node-1", node_deployment=True, csi_address=endpoint)
        await lab.make_claim("data", size)
        assert await told(lab, *words)
        assert not await lab.volumes()
