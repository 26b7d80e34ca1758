"""Which volumes a pod needs, from the pod, its claims and their volumes.

Owns: every reason for which a volume cannot be used yet. Pure: the API objects are handed in.
Start reading at: `uses_of`, `refuse_replacements`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from moorage.errors import MoorageError
from moorage.kube.names import CLAIM_PROTECTION, CSI_PLUGIN
from moorage.kube.objects.core import Node
from moorage.kube.objects.meta import SecretReference
from moorage.kube.objects.pods import Pod, PodVolume
from moorage.kube.objects.storage import CsiDriverSpec
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.quantity import Quantity
from moorage.kube.selectors import node_matches
from moorage.kube.volumes import VolumeName, claim_name_of, csi_volume_name, ephemeral_handle
from moorage.node.layout import PodUid, pod_volume_name
from moorage.node.safe_names import check_driver, check_volume
from moorage.node.volumes.mounters.builtin import OF_OBJECTS, PlainBody, plugin_of
from moorage.node.volumes.rules import mount_label
from moorage.node.volumes.state import CsiSource, PlainSource, PodRef, VolumeUse


class NotUsable(MoorageError):
    """A pod's volume cannot be used now, and why."""

    code = "FAILED_PRECONDITION"


class Lookup(Protocol):
    """The objects that a pod refers to, as last heard."""

    def claim(self, key: str) -> PersistentVolumeClaim | None: ...

    def volume(self, name: str) -> PersistentVolume | None: ...

    def driver(self, name: str) -> CsiDriverSpec | None: ...

    def node(self) -> Node | None: ...

    def has_se_linux(self) -> bool: ...


@dataclass(slots=True)
class Needs:
    """A pod's volumes: those that can be mounted, and why the others cannot."""

    uses: list[VolumeUse] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


def uses_of(pod: Pod, lookup: Lookup, sync_s: float) -> Needs:
    """What must be mounted for the pod. Volumes that no container refers to are not."""
    needs = Needs()
    mounted, mapped = _referenced(pod)
    by_volume: dict[str, VolumeUse] = {}
    by_place: dict[tuple[str, bool], VolumeName] = {}
    for volume in pod.spec.volumes:
        if volume.name not in mounted and volume.name not in mapped:
            continue
        try:
            use = _use(pod, volume, lookup, sync_s)
            _check_mode(use, volume.name, mounted, mapped)
            _check_directory(use, by_place)
        except (MoorageError, ValueError) as error:  # unreadable quantities and selectors among them
            needs.errors[volume.name] = str(error)
            continue
        known = by_volume.get(use.volume)
        if known is not None:  # one claim under two names: mounted once
            use = _merged(known, use)
        by_volume[use.volume] = use
    needs.uses = list(by_volume.values())
    return needs


def refuse_replacements(needs: Needs, found: Mapping[VolumeName, CsiSource], given: Collection[VolumeName]) -> None:
    """A pod that an earlier agent has served keeps what it began with, although recreated claims lead elsewhere now.
    Which of its names a volume `found` on disk belongs to is not known any more: as long as there is one that no claim
    of the pod leads to, the pod gets no volume but those found and those `given` to it by this agent."""
    wanted = {use.volume: use.source.spec_name for use in needs.uses}
    left = sorted(one.spec_name for name, one in found.items() if wanted.get(name) != one.spec_name)
    if not left:
        return
    reason = f"the pod began with volume {', '.join(left)}, and gets no other in its place until it is deleted"
    for use in needs.uses:
        known = found.get(use.volume)
        if _is_persistent(use) and use.volume not in given and (known is None or known.spec_name in left):
            needs.errors.update(dict.fromkeys(use.outer_names, reason))
    needs.uses = [use for use in needs.uses if needs.errors.keys().isdisjoint(use.outer_names)]


def _is_persistent(use: VolumeUse) -> bool:
    return isinstance(use.source, CsiSource) and not use.source.is_ephemeral


def same_for_uses(old: PersistentVolumeClaim, new: PersistentVolumeClaim) -> bool:
    """Whether nothing of a claim has changed that `uses_of` looks at: others write much to a claim."""
    one, other = old.metadata, new.metadata
    return (
        (one.uid, one.deletion_timestamp, one.finalizers) == (other.uid, other.deletion_timestamp, other.finalizers)
        and one.owner_references == other.owner_references
        and old.spec.volume_name == new.spec.volume_name
        and (old.status.phase, old.status.capacity) == (new.status.phase, new.status.capacity)
        and old.status.allocated_resource_statuses == new.status.allocated_resource_statuses
    )


def _referenced(pod: Pod) -> tuple[set[str], set[str]]:
    every = (*pod.spec.init_containers, *pod.spec.containers)
    mounted = {mount.name for one in every for mount in one.volume_mounts}
    mapped = {device.name for one in every for device in one.volume_devices}
    return mounted, mapped


def _use(pod: Pod, volume: PodVolume, lookup: Lookup, sync_s: float) -> VolumeUse:
    check_volume("volume", volume.name)
    if volume.csi is not None:
        return _inline(pod, volume, lookup, sync_s)
    if volume.persistent_volume_claim is not None or volume.ephemeral is not None:
        return _claimed(pod, volume, lookup, sync_s)
    plugin = plugin_of(volume)
    medium = volume.empty_dir.medium if volume.empty_dir is not None else ""
    if medium not in ("", "Memory"):
        raise NotUsable(f"volume {volume.name}: this node agent makes no emptyDir of medium {medium}")
    if not plugin:
        raise NotUsable(f"volume {volume.name}: this kind of volume is not made by this node agent")
    security = pod.spec.security_context
    return VolumeUse(
        volume=pod_volume_name(plugin, pod.uid, volume.name),
        pod=_ref(pod),
        source=PlainSource(plugin, volume.name, PlainBody(volume, pod)),
        outer_names=(volume.name,),
        fs_group=security.fs_group if security else None,
        fs_group_on_root_mismatch=_on_mismatch(pod),
        republish_s=sync_s if plugin in OF_OBJECTS else 0.0,
    )


def _inline(pod: Pod, volume: PodVolume, lookup: Lookup, sync_s: float) -> VolumeUse:
    csi = volume.csi
    assert csi is not None
    check_driver(csi.driver)
    secret = csi.node_publish_secret_ref
    source = CsiSource(
        driver=csi.driver,
        handle=ephemeral_handle(pod.uid, volume.name),
        spec_name=volume.name,
        is_ephemeral=True,
        fs_type=csi.fs_type or "",
        attributes=dict(csi.volume_attributes),
        publish_secret=SecretReference(name=secret.name, namespace=pod.namespace) if secret else None,
    )
    security = pod.spec.security_context
    driver = lookup.driver(csi.driver)
    return VolumeUse(
        volume=pod_volume_name(CSI_PLUGIN, pod.uid, volume.name),
        pod=_ref(pod),
        source=source,
        outer_names=(volume.name,),
        read_only=csi.read_only,
        fs_group=security.fs_group if security else None,
        fs_group_on_root_mismatch=_on_mismatch(pod),
        se_linux_label=mount_label(pod, (volume.name,), driver) if lookup.has_se_linux() else "",
        republish_s=_republish(driver, sync_s),
    )


def _claimed(pod: Pod, volume: PodVolume, lookup: Lookup, sync_s: float) -> VolumeUse:
    key = f"{pod.namespace}/{claim_name_of(pod, volume)}"
    claim = lookup.claim(key)
    if claim is None:
        raise NotUsable(f"persistentvolumeclaim {key!r} not found")
    pv = _bound_volume(pod, volume, claim, lookup)
    csi = pv.spec.csi
    if csi is None:
        raise NotUsable(
            f"volume {pv.name} is not a CSI volume; this node agent mounts no other kind of PersistentVolume"
        )
    check_volume("PersistentVolume", pv.name)
    check_driver(csi.driver)
    node = lookup.node()
    affinity = pv.spec.node_affinity
    if node is not None and affinity is not None and not node_matches(affinity.required, node.labels, node.name):
        raise NotUsable(f"volume {pv.name}: its node affinity does not match node {node.name}")
    is_block = pv.spec.volume_mode == "Block"
    source = CsiSource(
        driver=csi.driver,
        handle=csi.volume_handle,
        spec_name=pv.name,
        is_block=is_block,
        claim=key,
        claim_uid=claim.uid,
        access_modes=tuple(pv.spec.access_modes),
        fs_type=csi.fs_type,
        mount_options=tuple(pv.spec.mount_options),
        attributes=dict(csi.volume_attributes),
        stage_secret=csi.node_stage_secret_ref,
        publish_secret=csi.node_publish_secret_ref,
        expand_secret=csi.node_expand_secret_ref,
    )
    driver = lookup.driver(csi.driver)
    read_only = volume.persistent_volume_claim is not None and volume.persistent_volume_claim.read_only
    security = pod.spec.security_context
    return VolumeUse(
        volume=csi_volume_name(csi.driver, csi.volume_handle),
        pod=_ref(pod),
        source=source,
        outer_names=(volume.name,),
        is_attachable=driver is None or driver.attach_required is not False,
        read_only=read_only,
        fs_group=security.fs_group if security else None,
        fs_group_on_root_mismatch=_on_mismatch(pod),
        se_linux_label=mount_label(pod, _names_of(pod, key), driver) if lookup.has_se_linux() and not is_block else "",
        size_bytes=_size(pv.spec.capacity.get("storage")),
        claim_size_bytes=_size(claim.status.capacity.get("storage")),
        claim_expands=claim.status.allocated_resource_statuses.get("storage", "") not in _HOLDS_BACK,
        republish_s=_republish(driver, sync_s),
    )


_HOLDS_BACK = frozenset({"ControllerResizeInProgress", "ControllerResizeInfeasible", "NodeResizeInfeasible"})


def _bound_volume(pod: Pod, volume: PodVolume, claim: PersistentVolumeClaim, lookup: Lookup) -> PersistentVolume:
    if volume.ephemeral is not None and not any(
        owner.uid == pod.uid and owner.controller for owner in claim.metadata.owner_references
    ):
        raise NotUsable(f"PVC {claim.key} was not created for pod {pod.key} (pod is not owner)")
    if claim.is_deleting and CLAIM_PROTECTION not in claim.finalizers:
        raise NotUsable(f"PVC {claim.key} is being deleted")
    if claim.status.phase != "Bound" or not claim.spec.volume_name:
        raise NotUsable(f"PVC {claim.key} is not bound")
    pv = lookup.volume(claim.spec.volume_name)
    if pv is None:
        raise NotUsable(f"persistentvolume {claim.spec.volume_name!r} not found")
    if pv.spec.claim_ref is None or pv.spec.claim_ref.uid != claim.uid:
        raise NotUsable(f"volume {pv.name} is not bound to PVC {claim.key}")
    return pv


def _check_mode(use: VolumeUse, name: str, mounted: set[str], mapped: set[str]) -> None:
    is_block = isinstance(use.source, CsiSource) and use.source.is_block
    if is_block and name in mounted:
        raise NotUsable(f"volume {name} has volumeMode Block, but is specified in volumeMounts")
    if not is_block and name in mapped:
        raise NotUsable(f"volume {name} has volumeMode Filesystem, but is specified in volumeDevices")


def _check_directory(use: VolumeUse, by_place: dict[tuple[str, bool], VolumeName]) -> None:
    """A pod's CSI volumes lie side by side under the names of PersistentVolumes and of inline volumes."""
    if isinstance(use.source, CsiSource):
        name = use.source.spec_name
        if by_place.setdefault((name, use.source.is_block), use.volume) != use.volume:
            raise NotUsable(f"inline volume {name} has the name of PersistentVolume {name}, which the pod uses too")


def _merged(one: VolumeUse, other: VolumeUse) -> VolumeUse:
    return replace(
        other, outer_names=(*one.outer_names, *other.outer_names), read_only=one.read_only and other.read_only
    )


def _names_of(pod: Pod, claim: str) -> list[str]:
    """The pod's names for a claim: one volume for all of them."""
    return [one.name for one in pod.spec.volumes if f"{pod.namespace}/{claim_name_of(pod, one)}" == claim]


def _ref(pod: Pod) -> PodRef:
    return PodRef(PodUid(pod.uid), pod.namespace, pod.name, pod.spec.service_account_name or "default")


def _on_mismatch(pod: Pod) -> bool:
    security = pod.spec.security_context
    return security is not None and security.fs_group_change_policy == "OnRootMismatch"


def _republish(driver: CsiDriverSpec | None, sync_s: float) -> float:
    return sync_s if driver is not None and driver.requires_republish else 0.0


def _size(quantity: str | float | None) -> int:
    return Quantity.parse(quantity).value if quantity is not None else 0
