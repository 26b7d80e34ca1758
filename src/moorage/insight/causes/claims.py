"""Why a claim is Pending: its class, its source, its driver, or nothing that fits."""

from moorage.insight.causes.model import Finding, cause, code_in, names, said
from moorage.insight.matching import (
    class_name_of,
    class_of,
    default_classes,
    holder_of,
    is_held_for,
    leases_of,
    mismatches,
)
from moorage.insight.world import World
from moorage.kube.objects import Event, PersistentVolumeClaim, Pod, StorageClass
from moorage.kube.quantity import bytes_of, bytes_text

_PENDING = ("", "Pending")
_SELECTED = "volume.kubernetes.io/selected-node"
_PROVISIONER = ("volume.kubernetes.io/storage-provisioner", "volume.beta.kubernetes.io/storage-provisioner")
_NO_PROVISIONER = "kubernetes.io/no-provisioner"


def is_waiting(claim: PersistentVolumeClaim) -> bool:
    return claim.status.phase in _PENDING and not claim.is_deleting


def asked_of(claim: PersistentVolumeClaim) -> str:
    """The provisioner that was asked to make a volume, if one was."""
    return next((claim.annotations[key] for key in _PROVISIONER if key in claim.annotations), "")


def needs_provisioning(world: World, claim: PersistentVolumeClaim) -> StorageClass | None:
    """The class that should provision this claim, when it waits for that."""
    if not is_waiting(claim) or claim.spec.volume_name:
        return None
    return class_of(world, claim)


@cause(
    "claim-volume-missing",
    PersistentVolumeClaim,
    "The claim names a volume that does not exist",
    "Create the volume, or delete the claim and create it without volumeName.",
)
def volume_missing(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.volumeName` is set to a name that no PersistentVolume has; the binder waits for it to appear."""
    name = claim.spec.volume_name
    if not is_waiting(claim) or not name or name in world.volumes:
        return None
    return Finding(
        f"it asks for volume {name} by name, and there is no such volume",
        f"kubectl get pv {name}",
    )


@cause(
    "claim-volume-taken",
    PersistentVolumeClaim,
    "The volume that the claim names belongs to another claim",
    "Use another volume; or, if the other claim is gone for good, clear the volume's claimRef so that it is free again.",
)
def volume_taken(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.volumeName` names a volume whose claimRef points at another claim, or at a deleted claim of the same name
    (the uid differs). Kubernetes never takes a volume away from the claim it was given to."""
    volume = world.volumes.get(claim.spec.volume_name)
    if not is_waiting(claim) or volume is None or volume.spec.claim_ref is None or is_held_for(volume, claim):
        return None
    same = holder_of(volume) == claim.key
    who = "an earlier claim of the same name (another uid)" if same else f"claim {holder_of(volume)}"
    step = f'kubectl patch pv {volume.name} --type json -p \'[{{"op":"remove","path":"/spec/claimRef"}}]\''
    return Finding(f"volume {volume.name} is held by {who}", step, said(world.warning(claim, "FailedBinding")), volume)


@cause(
    "claim-volume-mismatch",
    PersistentVolumeClaim,
    "The volume that the claim names does not fit it",
    "Change the field that differs; a claim's size, class and modes must be met by the volume.",
)
def volume_mismatch(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.volumeName` names a free volume, but its size, class, access modes, volume mode or attributes class do not
    satisfy the claim."""
    volume = world.volumes.get(claim.spec.volume_name)
    if not is_waiting(claim) or volume is None or volume.spec.claim_ref is not None:
        return None
    found = mismatches(claim, volume)
    if not found:
        return None
    return Finding(
        f"volume {volume.name} does not fit: {'; '.join(found)}",
        f"kubectl get pv {volume.name} -o yaml",
        said(world.warning(claim, "VolumeMismatch")),
    )


@cause(
    "claim-class-missing",
    PersistentVolumeClaim,
    "The claim's storage class does not exist",
    "Create the class, or delete the claim and create it with a class that exists.",
)
def class_missing(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.storageClassName` names a class that is not there. A volume of that class name could still be bound by
    hand, but nothing will be provisioned."""
    name = class_name_of(claim)
    if not is_waiting(claim) or claim.spec.volume_name or not name or name in world.classes:
        return None
    have = names(sorted(world.classes.values(), key=lambda c: c.name)) or "none"
    return Finding(
        f"storage class {name!r} does not exist (there is: {have})",
        "kubectl get storageclass",
        said(world.warning(claim, "ProvisioningFailed")),
    )


@cause(
    "claim-default-ambiguous",
    PersistentVolumeClaim,
    "Several storage classes are marked as the default",
    'Leave the annotation storageclass.kubernetes.io/is-default-class: "true" on one class only.',
)
def default_ambiguous(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim names no class and more than one class is marked as default; the newest is used, which may not be the
    one that was meant."""
    defaults = default_classes(world)
    if not is_waiting(claim) or class_name_of(claim) is not None or len(defaults) < 2:
        return None
    return Finding(
        f"it names no class, and {names(defaults)} are all marked as the default",
        f"kubectl annotate storageclass {defaults[-1].name} storageclass.kubernetes.io/is-default-class-",
    )


@cause(
    "claim-class-none",
    PersistentVolumeClaim,
    "The claim names no class and there is no default class",
    "Mark a class as the default, or name one in the claim, or create a volume that fits.",
)
def class_none(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """Without a class nothing provisions a volume; the claim can only be bound to an existing volume without class."""
    if not is_waiting(claim) or claim.spec.volume_name or class_name_of(claim) is not None or default_classes(world):
        return None
    step = "kubectl annotate storageclass NAME storageclass.kubernetes.io/is-default-class=true"
    return Finding("it names no storage class and no class is the default", step)


@cause(
    "claim-static-no-match",
    PersistentVolumeClaim,
    "No existing volume fits a claim that is not provisioned",
    "Create a volume that fits, or change the field that is named; an empty storageClassName is never provisioned.",
)
def static_no_match(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim's class is empty, or its provisioner is kubernetes.io/no-provisioner, so it can only be bound to a
    volume that is already there; none is free and fits. The closest ones are compared field by field."""
    storage_class = class_of(world, claim)
    static = class_name_of(claim) == "" or (storage_class is not None and storage_class.provisioner == _NO_PROVISIONER)
    if not is_waiting(claim) or claim.spec.volume_name or not static:
        return None
    free = [v for v in world.volumes.values() if v.spec.claim_ref is None]
    if any(not mismatches(claim, volume) for volume in free) and storage_class is None:
        return None
    close = sorted(free, key=lambda volume: len(mismatches(claim, volume)))[:3]
    evidence = tuple(f"{v.name}: {'; '.join(mismatches(claim, v)) or 'fits'}" for v in close)
    waits = _first_consumer(world, claim, storage_class) if storage_class is not None else None
    if waits is not None and any(not mismatches(claim, volume) for volume in free):
        return waits
    return Finding(
        "it is not provisioned (its class has no provisioner), and no free volume fits",
        "kubectl get pv",
        evidence or ("there is no free volume at all",),
    )


@cause(
    "claim-modifier-missing",
    PersistentVolumeClaim,
    "The claim's VolumeAttributesClass does not exist",
    "Create the VolumeAttributesClass, or remove volumeAttributesClassName from the claim.",
)
def modifier_missing(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.volumeAttributesClassName` names a class that is not there; neither creation nor modification goes on."""
    name = claim.spec.volume_attributes_class_name
    if claim.is_deleting or not name or name in world.modifiers or "VolumeAttributesClass" in world.unreadable:
        return None
    return Finding(
        f"VolumeAttributesClass {name!r} does not exist",
        "kubectl get volumeattributesclass",
        said(world.warning(claim)),
    )


@cause(
    "claim-source-snapshot-missing",
    PersistentVolumeClaim,
    "The snapshot to restore does not exist",
    "Create the snapshot, or delete the claim.",
)
def source_snapshot_missing(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The data source is a VolumeSnapshot that is not in the claim's namespace."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if (
        not is_waiting(claim)
        or source is None
        or source.kind != "VolumeSnapshot"
        or source.namespace not in (None, claim.namespace)
    ):
        return None
    if f"{claim.namespace}/{source.name}" in world.snapshots:
        return None
    return Finding(
        f"it is to be restored from snapshot {source.name}, which does not exist in {claim.namespace}",
        f"kubectl -n {claim.namespace} get volumesnapshot",
        said(world.warning(claim)),
    )


@cause(
    "claim-source-snapshot-not-ready",
    PersistentVolumeClaim,
    "The snapshot to restore is not ready",
    "Wait for the snapshot; the explanation follows it.",
)
def source_snapshot_not_ready(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The data source is a VolumeSnapshot whose readyToUse is not true yet."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if not is_waiting(claim) or source is None or source.kind != "VolumeSnapshot":
        return None
    snapshot = world.snapshots.get(f"{claim.namespace}/{source.name}")
    if snapshot is None or (snapshot.status is not None and snapshot.status.ready_to_use):
        return None
    return Finding(f"it waits for snapshot {source.name} to be ready", waits_for=snapshot)


@cause(
    "claim-source-claim-missing",
    PersistentVolumeClaim,
    "The claim to clone does not exist",
    "Create the source claim, or delete this one.",
)
def source_claim_missing(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The data source is a PersistentVolumeClaim that is not in the claim's namespace."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if not is_waiting(claim) or source is None or source.kind != "PersistentVolumeClaim":
        return None
    if f"{claim.namespace}/{source.name}" in world.claims:
        return None
    return Finding(
        f"it is to be cloned from claim {source.name}, which does not exist in {claim.namespace}",
        f"kubectl -n {claim.namespace} get pvc",
        said(world.warning(claim)),
    )


@cause(
    "claim-source-claim-not-bound",
    PersistentVolumeClaim,
    "The claim to clone is not bound",
    "Wait for the source claim; the explanation follows it.",
)
def source_claim_not_bound(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """A clone is made from a bound claim only."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if not is_waiting(claim) or source is None or source.kind != "PersistentVolumeClaim":
        return None
    origin = world.claims.get(f"{claim.namespace}/{source.name}")
    if origin is None or origin.status.phase == "Bound":
        return None
    return Finding(f"it waits for claim {source.name}, its source, to be bound", waits_for=origin)


@cause(
    "claim-source-too-large",
    PersistentVolumeClaim,
    "The claim is smaller than its source",
    "Ask for at least the size of the source.",
)
def source_too_large(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """A restore or a clone must be at least as large as what it is made from."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if not is_waiting(claim) or source is None:
        return None
    size = 0
    if source.kind == "VolumeSnapshot":
        snapshot = world.snapshots.get(f"{claim.namespace}/{source.name}")
        size = bytes_of(snapshot.status.restore_size) if snapshot is not None and snapshot.status is not None else 0
    elif source.kind == "PersistentVolumeClaim":
        origin = world.claims.get(f"{claim.namespace}/{source.name}")
        size = bytes_of(origin.status.capacity.get("storage")) if origin is not None else 0
    want = bytes_of(claim.spec.resources.requests.get("storage"))
    if not size or want >= size:
        return None
    return Finding(
        f"it asks for {bytes_text(want)}, and its source {source.name} has {bytes_text(size)}",
        f"recreate the claim with at least {bytes_text(size)}",
        said(world.warning(claim)),
    )


@cause(
    "claim-populator-missing",
    PersistentVolumeClaim,
    "The claim's data source needs a populator that is not there",
    "Install the populator for that kind, or use a VolumeSnapshot or a PersistentVolumeClaim as the source.",
)
def populator_missing(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """`spec.dataSourceRef` names a kind that no CSI driver fills; an extra controller, a populator, must do it."""
    source = claim.spec.data_source_ref
    if not is_waiting(claim) or source is None or source.kind in ("VolumeSnapshot", "PersistentVolumeClaim"):
        return None
    return Finding(
        f"its content is to come from {source.kind} {source.name}, and nothing has filled it yet",
        "kubectl get volumepopulators",
        said(world.warning(claim)),
    )


@cause(
    "claim-first-consumer-node-name",
    PersistentVolumeClaim,
    "A pod that sets nodeName skips the scheduler, which must choose",
    "Use a nodeSelector on kubernetes.io/hostname in place of nodeName.",
)
def first_consumer_node_name(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The class binds at the first consumer, and the pod that uses the claim names its node itself. Only the
    scheduler writes the chosen node on the claim, so provisioning never begins."""
    storage_class = needs_provisioning(world, claim)
    if not _late(storage_class) or _SELECTED in claim.annotations:
        return None
    pinned = [p for p in world.pods_of(claim) if p.spec.node_name and not _was_scheduled(p)]
    if not pinned:
        return None
    pod = pinned[0]
    return Finding(
        f"its class waits for the scheduler to choose a node, and pod {pod.name} sets nodeName: {pod.spec.node_name}",
        f"recreate pod {pod.name} with nodeSelector kubernetes.io/hostname: {pod.spec.node_name}",
    )


@cause(
    "claim-first-consumer-no-pod",
    PersistentVolumeClaim,
    "The claim waits for a pod to use it",
    "Create a pod that uses the claim. This is how WaitForFirstConsumer classes work; nothing is wrong.",
)
def first_consumer_no_pod(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The class has volumeBindingMode WaitForFirstConsumer: a volume is made when a pod needs it, where that pod can
    run."""
    storage_class = needs_provisioning(world, claim)
    if not _late(storage_class) or _SELECTED in claim.annotations or world.pods_of(claim):
        return None
    return Finding(
        "its class waits for the first pod that uses it, and no pod does", f"create a pod that uses claim {claim.name}"
    )


@cause(
    "claim-first-consumer-unscheduled",
    PersistentVolumeClaim,
    "The pod that uses the claim has no node yet",
    "The explanation follows the pod.",
)
def first_consumer_unscheduled(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The class waits for the scheduler, and the scheduler has not found a node for the pod."""
    storage_class = needs_provisioning(world, claim)
    if not _late(storage_class) or _SELECTED in claim.annotations:
        return None
    waiting: list[Pod] = [pod for pod in world.pods_of(claim) if not pod.spec.node_name]
    if not waiting:
        return None
    return Finding(f"it waits for pod {waiting[0].name} to be given a node", waits_for=waiting[0])


@cause(
    "claim-driver-not-installed",
    PersistentVolumeClaim,
    "The class's driver is not installed",
    "Install the driver, or correct the provisioner of the class.",
)
def driver_not_installed(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The class names a provisioner that has neither a CSIDriver object nor an entry on any node, and none of its
    sidecars has ever held a lease."""
    storage_class = needs_provisioning(world, claim)
    if storage_class is None or storage_class.provisioner == _NO_PROVISIONER:
        return None
    driver = storage_class.provisioner
    if world.is_installed(driver) or leases_of(world, driver) or world.warning(claim, "ProvisioningFailed"):
        return None
    known = ", ".join(sorted(world.drivers)) or "none"
    return Finding(
        f"driver {driver} of class {storage_class.name} is not installed (installed: {known})",
        "kubectl get csidrivers,csinodes",
    )


@cause(
    "claim-secret-missing",
    PersistentVolumeClaim,
    "A secret that the class names does not exist",
    "Create the secret, or correct the class's parameters (a class is immutable: delete and create it).",
)
def secret_missing(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The class's parameters name a secret for the driver that is not there."""
    storage_class = needs_provisioning(world, claim)
    if storage_class is None:
        return None
    parameters = storage_class.parameters
    for role in ("provisioner", "controller-publish", "node-stage", "node-publish", "controller-expand", "node-expand"):
        name = parameters.get(f"csi.storage.k8s.io/{role}-secret-name", "")
        namespace = parameters.get(f"csi.storage.k8s.io/{role}-secret-namespace", "")
        if name and world.asked_secrets.get(f"{namespace}/{name}") is False:
            return Finding(
                f"secret {namespace}/{name}, which class {storage_class.name} names, does not exist",
                f"kubectl -n {namespace} get secret {name}",
                said(world.warning(claim, "ProvisioningFailed")),
            )
    return None


@cause(
    "claim-no-capacity",
    PersistentVolumeClaim,
    "There is no room for a volume of that size",
    "Free space, add a pool, or ask for less. `moorage volume list` shows what holds the space.",
)
def no_capacity(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver answered RESOURCE_EXHAUSTED: no pool that the volume could live in has that much room."""
    event = world.warning(claim, "ProvisioningFailed")
    if not is_waiting(claim) or event is None or code_in(event.message) != "RESOURCE_EXHAUSTED":
        return None
    want = bytes_text(bytes_of(claim.spec.resources.requests.get("storage")))
    return Finding(f"the driver has no room for {want}", "kubectl get csistoragecapacities -A", said(event))


@cause(
    "claim-size-impossible",
    PersistentVolumeClaim,
    "The driver can never make a volume of that size",
    "Ask for a size within the driver's limits; its words name them.",
)
def size_impossible(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver answered OUT_OF_RANGE: the size is below its smallest or above its largest, or below the source's."""
    event = world.warning(claim, "ProvisioningFailed")
    if not is_waiting(claim) or event is None or code_in(event.message) != "OUT_OF_RANGE":
        return None
    return Finding("the driver cannot make a volume of that size", "recreate the claim with another size", said(event))


@cause(
    "claim-refused",
    PersistentVolumeClaim,
    "The driver refused what the class or claim asks for",
    "Correct the class's parameters or the claim; a class is immutable, so delete it and create it anew.",
)
def refused(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver answered INVALID_ARGUMENT: an unknown parameter, an access mode or a volume mode that it does not
    have. It is tried again only every five minutes."""
    event = world.warning(claim, "ProvisioningFailed")
    if not is_waiting(claim) or event is None or code_in(event.message) != "INVALID_ARGUMENT":
        return None
    return Finding(
        "the driver refuses to make the volume", f"kubectl get storageclass {class_name_of(claim)} -o yaml", said(event)
    )


@cause(
    "claim-provisioning-fails",
    PersistentVolumeClaim,
    "Provisioning fails",
    "Read the driver's words; it is tried again with growing waits.",
)
def provisioning_fails(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """CreateVolume, or what comes before it, fails; the event holds the words of the driver or the provisioner."""
    event = world.warning(claim, "ProvisioningFailed", "ProvisioningCleanupFailed")
    if not is_waiting(claim) or event is None:
        return None
    return Finding(
        f"making its volume fails: {event.message}",
        f"kubectl -n {claim.namespace} describe pvc {claim.name}",
        said(event),
    )


@cause(
    "claim-provisioner-not-leading",
    PersistentVolumeClaim,
    "The provisioner's leader has stopped renewing its lease",
    "Look at the provisioner's pod; another instance takes over when the lease has run out.",
)
def provisioner_not_leading(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The lease of the driver's provisioner exists and has expired: the process that led is gone or hangs."""
    driver = asked_of(claim)
    if not is_waiting(claim) or not driver:
        return None
    stale = [lease for lease in leases_of(world, driver) if not world.is_fresh(lease)]
    if not stale:
        return None
    return Finding(
        f"the provisioner of {driver} has stopped: its lease, held by {stale[0].spec.holder_identity or 'nobody'}, has run out",
        f"kubectl -n {stale[0].namespace} get lease {stale[0].name} -o yaml",
    )


@cause(
    "claim-provisioner-not-running",
    PersistentVolumeClaim,
    "Nobody provisions for the driver",
    "Start the driver's provisioner (`moorage sidecars provisioner --csi-address …`).",
)
def provisioner_not_running(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim has been handed to the driver's provisioner, and the provisioner has not said a word about it."""
    driver = asked_of(claim)
    if not is_waiting(claim) or not driver:
        return None
    if any(event.reason == "Provisioning" for event in world.events_of(claim)):
        return None
    return Finding(
        f"it was handed to the provisioner of {driver}, which has not answered; is it running?",
        "kubectl get pods -A | grep -i provisioner",
        said(_newest(world, claim)),
    )


@cause(
    "claim-provisioning",
    PersistentVolumeClaim,
    "The volume is being made",
    "Wait; the driver is at work.",
)
def provisioning(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The provisioner has begun and has not finished: the driver's CreateVolume is running, or a copy is under way."""
    if not is_waiting(claim) or not any(event.reason == "Provisioning" for event in world.events_of(claim)):
        return None
    return Finding(f"the provisioner of {asked_of(claim)} is making its volume", "", said(_newest(world, claim)))


@cause(
    "claim-binder-not-running",
    PersistentVolumeClaim,
    "Nobody binds claims to volumes",
    "Start the binder (kube-controller-manager, or `moorage controllers binder`).",
)
def binder_not_running(world: World, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim is Pending, has a class or a volume that fits, and no controller has said or written anything."""
    if not is_waiting(claim) or world.events_of(claim) or asked_of(claim):
        return None
    return Finding(
        "nothing has happened to it at all: the volume binder does not seem to run", "kubectl -n kube-system get pods"
    )


def _late(storage_class: StorageClass | None) -> bool:
    return storage_class is not None and storage_class.volume_binding_mode == "WaitForFirstConsumer"


def _was_scheduled(pod: Pod) -> bool:
    return any(condition.type == "PodScheduled" and condition.reason != "" for condition in pod.status.conditions)


def _first_consumer(world: World, claim: PersistentVolumeClaim, storage_class: StorageClass | None) -> Finding | None:
    if not _late(storage_class):
        return None
    return first_consumer_no_pod(world, claim) or first_consumer_unscheduled(world, claim)


def _newest(world: World, claim: PersistentVolumeClaim) -> Event | None:
    return next(iter(world.events_of(claim)), None)
