"""A node that is gone for good: what waits for it is let go, what is in use is only reported."""

from moorage.kube.objects import Lease, PersistentVolume, PersistentVolumeClaim
from moorage.sidecars.roles import Role
from moorage.sidecars.takeover import carry_out, plan
from moorage.sidecars.testing import Abilities

SELECTED = "volume.kubernetes.io/selected-node"
LOCAL = Abilities(plugin=("CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"))


async def test_what_waits_for_a_lost_node_is_let_go(make_lab):
    async with make_lab(LOCAL) as lab:
        lab.driver.topology = {"host": "node-1"}
        await lab.make_node("node-1", keys=("host",), host="node-1")
        await lab.make_class(volumeBindingMode="WaitForFirstConsumer")
        running = lab.start(Role.PROVISIONER, node="node-1", node_deployment=True)
        for name in ("kept", "released"):
            await lab.make_claim(name, annotations={SELECTED: "node-1"})
            await lab.bound(name)

        async def is_noted():
            return await lab.client.find(Lease, "test-csi-moorage-dev-intents-node-1", "default")

        await lab.until(is_noted)
        await lab.kill(running)
        await lab.client.delete(PersistentVolumeClaim, "released", "default")
        await lab.make_claim("waiting", annotations={SELECTED: "node-1"})

        async def is_released():
            return any(volume.status.phase == "Released" for volume in await lab.volumes())

        async def is_asked():
            return "volume.kubernetes.io/storage-provisioner" in (await lab.claim("waiting")).annotations

        await lab.until(is_released)
        await lab.until(is_asked)
        steps = await plan(lab.client, lab.driver.name, "node-1", "default")
        assert sorted(step.what for step in steps) == ["forget-volume", "keep", "remove", "reschedule"]
        for step in steps:
            await carry_out(lab.client, step)

        async def is_settled():
            return [volume.status.phase for volume in await lab.volumes()] == ["Bound"]

        await lab.until(is_settled)
        assert SELECTED not in (await lab.claim("waiting")).annotations
        assert (await lab.claim("kept")).status.phase == "Bound"
        assert len((await lab.client.list(PersistentVolume)).items) == 1
