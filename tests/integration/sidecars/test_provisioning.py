"""Claims become volumes, and released volumes go: the provisioner against a scripted driver."""

from moorage.sidecars.roles import Role


async def test_a_claim_is_bound_and_its_volume_goes_when_it_is_deleted(lab):
    lab.start(Role.PROVISIONER)
    await lab.make_class()
    await lab.make_claim("data")
    claim = await lab.bound("data")
    [volume] = await lab.volumes()
    assert volume.name == f"pvc-{claim.uid}"
    assert volume.spec.csi.volume_attributes["made"] == "yes"
    assert volume.finalizers[0] == "external-provisioner.volume.kubernetes.io/finalizer"
    [event] = await lab.events("ProvisioningSucceeded")
    assert event.involved_object.name == "data"

    await lab.client.delete(type(claim), "data", "default")
    await lab.gone()
    assert lab.driver.count("CreateVolume") == lab.driver.count("DeleteVolume") == 1
