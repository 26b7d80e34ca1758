"""Fill the state from the caches of pods, claims, volumes, nodes and drivers.

Owns: resolving a pod's volumes to attachable CSI volumes, and rebuilding the state after a start. The outcome of
operations is recorded by `execute.py`.
Start reading at: `Populator.rebuild`, `Populator.pod_changed`.

A volume stays desired until its pod ends, even if its claim is deleted: it may still be mounted.
"""

from collections.abc import Callable, Iterable, Iterator

from moorage.controllers.attachdetach.state import AttachState
from moorage.kube.cache.caches import Caches
from moorage.kube.names import MANAGED_ATTACH, OUT_OF_SERVICE
from moorage.kube.objects.core import Node
from moorage.kube.objects.meta import reference_to
from moorage.kube.objects.pods import Pod, PodVolume
from moorage.kube.objects.storage import CSIDriver, VolumeAttachment
from moorage.kube.objects.volumes import PersistentVolume, PersistentVolumeClaim
from moorage.kube.volumes import (
    NodeName,
    VolumeName,
    claim_name_of,
    csi_volume_name,
    driver_and_handle,
    is_owned_by,
    requires_attach,
)

_SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})


class Populator:
    """Turns each change of a cached object into a change of the state."""

    def __init__(self, world: AttachState, caches: Caches, clock: Callable[[], float], recheck_s: float) -> None:
        self._world = world
        self._caches = caches
        self._clock = clock
        self._recheck_s = recheck_s

    def rebuild(self, nodes: Iterable[Node], attachments: Iterable[VolumeAttachment]) -> None:
        """Rebuild the state after a start: volumes that nodes list are attached, other attachments are uncertain."""
        for node in nodes:
            self.node_changed(None, node)
            for listed in node.status.volumes_attached:
                if driver_and_handle(listed.name) is not None:
                    self._world.found_attached(VolumeName(listed.name), NodeName(node.name))
        for attachment in attachments:
            found = self.pair_of(attachment)
            if found is not None:
                self._world.found_attachment(*found)
        for pod in self._caches.pods:
            self.pod_changed(None, pod)

    def pair_of(self, attachment: VolumeAttachment) -> tuple[VolumeName, NodeName] | None:
        """Return the volume and node of an attachment. Returns None for inline sources and unknown volumes."""
        pv = self._caches.volumes.get(attachment.spec.source.persistent_volume_name or "")
        if pv is None or pv.spec.csi is None or not attachment.spec.node_name:
            return None
        csi = pv.spec.csi
        return csi_volume_name(csi.driver, csi.volume_handle), NodeName(attachment.spec.node_name)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        if old is not None and (new is None or new.uid != old.uid):
            self._world.unwant(old.uid)
        if new is None:
            return
        if new.is_terminated:
            self._world.unwant(new.uid)
        else:
            self._add(new)

    def claim_changed(self, old: PersistentVolumeClaim | None, new: PersistentVolumeClaim | None) -> None:
        if new is not None and new.status.phase == "Bound":
            self._add_pods(self._caches.pods_using(new.key))

    def pv_changed(self, old: PersistentVolume | None, new: PersistentVolume | None) -> None:
        if new is None or new.spec.csi is None:
            return
        known = self._world.volumes.get(csi_volume_name(new.spec.csi.driver, new.spec.csi.volume_handle))
        if known is not None and known.pv_name == new.name and known.is_shareable != _is_shareable(new):
            known.is_shareable = _is_shareable(new)
            self._world.dirty.add(known.name)
        claim = new.spec.claim_ref
        if claim is not None:
            self._add_pods(self._caches.pods_using(f"{claim.namespace}/{claim.name}"))

    def driver_changed(self, old: CSIDriver | None, new: CSIDriver | None) -> None:
        """Recheck the driver's pods later if it now requires attaching, or no longer does.

        Not at once: a CSIDriver is replaced by deleting and creating it, and detaching in between would take volumes
        away from running pods.
        """
        if requires_attach(old) != requires_attach(new):
            name = new.name if new is not None else old.name if old is not None else ""
            self._world.wake_driver_at(self._clock() + self._recheck_s, name)

    def recheck_driver(self, name: str) -> None:
        if not requires_attach(self._caches.drivers.get(name)):
            for volume in [v for v in self._world.volumes.values() if v.driver == name]:
                for wish in list(volume.wanted.values()):
                    for uid in list(wish.pods):
                        self._world.unwant(uid, volume.name)
        else:
            self._add_pods(self._caches.pods)

    def node_changed(self, old: Node | None, new: Node | None) -> None:
        if new is not None:
            self._take_node(old, new)
        elif old is not None and (known := self._world.nodes.get(NodeName(old.name))) is not None:
            known.exists = known.is_ready = known.is_out_of_service = False
            known.listed = frozenset()
            self._world.dirty |= known.volumes
            for name in known.volumes:  # a deleted node reports no more
                self._world.volumes[name].attachments[known.name].assumed_in_use = False
            if not known.volumes and not known.wishes:
                del self._world.nodes[known.name]

    def _take_node(self, old: Node | None, new: Node) -> None:
        world, known = self._world, self._world.node(NodeName(new.name))
        was_managed, was = known.is_managed, (known.is_ready, known.is_out_of_service, known.exists)
        known.exists = True
        known.is_managed = MANAGED_ATTACH in new.annotations
        known.is_ready = new.is_ready
        known.is_out_of_service = any(taint.key == OUT_OF_SERVICE for taint in new.spec.taints)
        in_use = frozenset(new.status.volumes_in_use)
        if was != (known.is_ready, known.is_out_of_service, True):
            world.dirty |= known.volumes
        if in_use != known.in_use:
            world.dirty |= {VolumeName(name) for name in in_use ^ known.in_use} & known.volumes
            known.in_use = in_use
        for name in known.volumes:
            attachment = world.volumes[name].attachments[known.name]
            if attachment.assumed_in_use:
                attachment.assumed_in_use = False
                world.dirty.add(name)
        self._take_listing(old, new)
        if known.is_managed and not was_managed:
            self._take_managed(new)

    def _take_managed(self, node: Node) -> None:
        """Attach for pods that are newer than the node at once, for older ones later: their kubelet attached before."""
        pods = list(self._caches.pods_on(node.name))
        newer = [pod for pod in pods if pod.version > node.version]
        self._add_pods(newer)
        if len(newer) < len(pods):
            self._world.wake_pods_at(self._clock() + self._recheck_s, NodeName(node.name))

    def recheck_node(self, name: NodeName) -> None:
        self._add_pods(self._caches.pods_on(name))

    def _take_listing(self, old: Node | None, new: Node) -> None:
        if old is not None and old.status.volumes_attached == new.status.volumes_attached:
            return
        known = self._world.nodes[NodeName(new.name)]
        listed = [(v.name, v.device_path) for v in new.status.volumes_attached]
        known.foreign = tuple(entry for entry in listed if driver_and_handle(entry[0]) is None)
        ours = frozenset(name for name, _ in listed if driver_and_handle(name) is not None)
        self._world.dirty |= {VolumeName(name) for name in ours ^ known.listed} & known.volumes
        known.listed = ours
        if old is None:
            self._world.dirty_nodes.add(known.name)
        elif known.listed != frozenset(self._world.listing(known.name)):
            # Another writer changed it. Kubernetes corrects it with its next own write, we after a while.
            self._world.wake_node_at(self._clock() + self._recheck_s, known.name)

    def _add_pods(self, pods: Iterable[Pod]) -> None:
        for pod in pods:
            if not pod.is_terminated:
                self._add(pod)

    def _add(self, pod: Pod) -> None:
        node = self._world.nodes.get(NodeName(pod.spec.node_name))
        if node is None or not node.is_managed:
            return
        for pv in self._attachable(pod):
            if pv.spec.csi is None:
                continue
            name = csi_volume_name(pv.spec.csi.driver, pv.spec.csi.volume_handle)
            volume = self._world.volume(name)
            if volume.pv_name != pv.name:  # two volumes with one handle: the stricter one counts
                volume.is_shareable = _is_shareable(pv) and (not volume.pv_name or volume.is_shareable)
                volume.pv_name, volume.driver = pv.name, pv.spec.csi.driver
            self._world.want(pod.uid, reference_to(pod), node.name, name)

    def _attachable(self, pod: Pod) -> Iterator[PersistentVolume]:
        for volume in pod.spec.volumes:
            claim = self._claim_of(pod, volume)
            if claim is None or claim.status.phase != "Bound" or not claim.spec.volume_name:
                continue
            pv = self._caches.volumes.get(claim.spec.volume_name)
            if pv is None or pv.spec.claim_ref is None or pv.spec.claim_ref.uid != claim.uid:
                continue
            csi = pv.spec.csi
            if csi and csi.driver and csi.volume_handle and requires_attach(self._caches.drivers.get(csi.driver)):
                yield pv

    def _claim_of(self, pod: Pod, volume: PodVolume) -> PersistentVolumeClaim | None:
        claim = self._caches.claims.get(f"{pod.namespace}/{claim_name_of(pod, volume)}")
        is_foreign = claim is not None and volume.ephemeral is not None and not is_owned_by(claim, pod)
        return None if is_foreign else claim


def _is_shareable(pv: PersistentVolume) -> bool:
    modes = pv.spec.access_modes
    return not modes or any(mode in _SHARED_MODES for mode in modes)
