"""From a claim and its class to an attempt: every check and every lookup before CreateVolume.

Owns: building the request. Whatever fails here has not reached the driver.
Start reading at: `Preparer.attempt`.
"""

from moorage.csi import csi_pb2 as pb
from moorage.csi.access_modes import ROX, capabilities_per_mode
from moorage.csi.capabilities import Capabilities
from moorage.csi.errors import InvalidAccessModes
from moorage.kube.errors import NotFound
from moorage.kube.objects import PersistentVolumeClaim, StorageClass, VolumeAttributesClass, reference_to
from moorage.kube.secrets import BadSecret
from moorage.kube.volumes import required_bytes, selected_node_of
from moorage.sidecars.context import RoleContext
from moorage.sidecars.errors import BadParameters, ProvisionError, ProvisioningState
from moorage.sidecars.provisioner import parameters, pv_document, sources, topology
from moorage.sidecars.provisioner.attempt import ProvisionAttempt
from moorage.sidecars.provisioner.decide import volume_name
from moorage.sidecars.provisioner.sources import DataSource


class Preparer:
    """Builds attempts for one driver."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context

    async def attempt(self, claim: PersistentVolumeClaim, storage_class: StorageClass) -> ProvisionAttempt:
        """What to ask of the driver for this claim; ProvisionError (or NotOurs) when it cannot be asked."""
        settings, can = self._context.settings, self._context.driver.capabilities
        source = sources.data_source_of(claim, settings.gate("CrossNamespaceVolumeDataSource", False))
        check_capabilities(claim, source, can)
        if claim.spec.selector is not None:
            raise ProvisionError(
                "a claim with a selector cannot be provisioned, only bound", ProvisioningState.FINISHED
            )
        name = volume_name(settings.volume_name_prefix, settings.volume_name_uuid_length, claim.uid)
        try:
            read = parameters.read(storage_class.parameters, claim, name, settings.default_fstype)
            request = self._request(claim, storage_class, name, read)
        except (BadParameters, BadSecret, InvalidAccessModes) as error:
            raise ProvisionError(str(error), ProvisioningState.FINISHED) from error
        if source is not None:
            request.volume_content_source.CopyFrom(
                await sources.content_source(
                    source,
                    claim,
                    storage_class,
                    self._context.client,
                    self._context.caches.claims,
                    prevent_conversion=settings.prevent_volume_mode_conversion,
                )
            )
        required = self._topology(claim, storage_class)
        if required is not None:
            request.accessibility_requirements.CopyFrom(required)
        if claim.spec.volume_attributes_class_name:
            found = await self._attributes(claim.spec.volume_attributes_class_name)
            request.mutable_parameters.update(found)
        read_only = settings.controller_publish_readonly and claim.spec.access_modes == [ROX]
        driver = self._context.driver.name
        return ProvisionAttempt(
            claim=reference_to(claim),
            class_name=storage_class.name,
            class_uid=storage_class.uid,
            request=request,
            skeleton=pv_document.skeleton(name, claim, storage_class, read, driver=driver, read_only=read_only),
            secret=read.secrets.get("provision"),
            has_selected_node=bool(selected_node_of(claim)),
            source=source,
            source_is_required=claim.spec.data_source is not None or (source is not None and source.crosses),
        )

    def _request(
        self,
        claim: PersistentVolumeClaim,
        storage_class: StorageClass,
        name: str,
        read: parameters.ClaimParameters,
    ) -> pb.CreateVolumeRequest:
        settings, can = self._context.settings, self._context.driver.capabilities
        request = pb.CreateVolumeRequest(
            name=name,
            capacity_range=pb.CapacityRange(required_bytes=required_bytes(claim)),
            volume_capabilities=capabilities_per_mode(
                claim.spec.access_modes,
                claim.spec.volume_mode == "Block",
                read.fs_type,
                storage_class.mount_options,
                can.single_node_multi_writer,
            ),
            parameters=read.for_driver,
        )
        if settings.extra_create_metadata:
            request.parameters.update(parameters.metadata_parameters(claim, name))
        return request

    def _topology(self, claim: PersistentVolumeClaim, storage_class: StorageClass) -> pb.TopologyRequirement | None:
        context = self._context
        if not context.driver.capabilities.has_topology or not context.settings.gate("Topology", True):
            return None
        node = selected_node_of(claim)
        return topology.requirement(
            storage_class,
            claim.name,
            self._selected(node) if node else None,
            self._cluster(),
            strict=context.settings.strict_topology,
            immediate=context.settings.immediate_topology,
        )

    def _selected(self, name: str) -> topology.Selected:
        context = self._context
        if context.settings.node_deployment:
            segments = context.driver.node.segments
            return topology.Selected(name, tuple(segments), segments)
        csi_node, node = context.caches.csi_nodes.get(name), context.nodes.get(name)
        if csi_node is None or node is None:
            raise topology.unreachable(f"the selected node {name} no longer exists")
        keys = next((d.topology_keys for d in csi_node.spec.drivers if d.name == context.driver.name), [])
        return topology.Selected(name, tuple(keys), node.labels)

    def _cluster(self) -> topology.NodeTopology:
        context = self._context
        if context.settings.node_deployment:
            own, segments = context.around.node_name, context.driver.node.segments
            return topology.NodeTopology({own: tuple(segments)}, {own: segments})
        keys = {
            csi_node.name: tuple(driver.topology_keys)
            for csi_node in context.caches.csi_nodes
            for driver in csi_node.spec.drivers
            if driver.name == context.driver.name
        }
        return topology.NodeTopology(keys, {node.name: node.labels for node in context.nodes})

    async def _attributes(self, name: str) -> dict[str, str]:
        try:
            found = await self._context.client.get(VolumeAttributesClass, name)
        except NotFound:
            raise ProvisionError(f"VolumeAttributesClass {name} does not exist") from None
        if found.driver_name != self._context.driver.name:
            raise ProvisionError(
                f"VolumeAttributesClass {name} is of driver {found.driver_name}", ProvisioningState.FINISHED
            )
        return found.parameters


def check_capabilities(claim: PersistentVolumeClaim, source: DataSource | None, can: Capabilities) -> None:
    """ProvisionError when the driver says that it cannot do what the claim needs."""
    needed = ["CREATE_DELETE_VOLUME"]
    if source is not None:
        needed.append("CREATE_DELETE_SNAPSHOT" if source.is_snapshot else "CLONE_VOLUME")
    if claim.spec.volume_attributes_class_name:
        needed.append("MODIFY_VOLUME")
    missing = [name for name in needed if not can.controller(name)]
    if missing:
        raise ProvisionError(
            f"the driver lacks the capability {', '.join(missing)} for this claim", ProvisioningState.FINISHED
        )
