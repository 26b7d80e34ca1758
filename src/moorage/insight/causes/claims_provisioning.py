"""Why a claim that is to be provisioned is Pending: its consumer, its driver, its provisioner."""

import json

from moorage.insight.causes.advice import Advice
from moorage.insight.causes.claims import (
    asked_of,
    is_waiting,
    needs_provisioning,
)
from moorage.insight.causes.model import Finding, cause, code_in, driver_words, names, said
from moorage.insight.causes.room import most_room, place_keys, places, show_room
from moorage.insight.cluster_view import ClusterView
from moorage.insight.matching import default_classes, is_leaderless, leases_of
from moorage.insight.waiting import exits_on
from moorage.kube.names import NO_PROVISIONER, SELECTED_NODE
from moorage.kube.objects import Event, PersistentVolumeClaim, Pod, seconds_of
from moorage.kube.quantity import bytes_text
from moorage.kube.volumes import admits, claim_class, default_class, requested_bytes, waits_for_consumer
from moorage.suggest import NOTHING, in_words, kubectl, pods_like


@cause(
    "claim-topology-excluded",
    PersistentVolumeClaim,
    "The class makes volumes only in places that no node has",
    "Label the nodes as the driver's documentation says, or use a class whose allowedTopologies name places that there "
    "are. A class is immutable: delete it and create it again.",
)
def topology_excluded(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """No node has the labels that the class's allowedTopologies ask for, so no volume can be made where a pod can run."""
    storage_class = needs_provisioning(view, claim)
    if storage_class is None or not storage_class.allowed_topologies or "Node" in view.unreadable:
        return None
    if any(admits(storage_class, node.labels) for node in view.nodes.values()):
        return None
    keys = place_keys(storage_class)
    have = {f"{key}={node.labels[key]}" for node in view.nodes.values() for key in keys if key in node.labels}
    return Finding(
        f"class {storage_class.name} makes volumes only where {places(storage_class)}, and no node is there "
        f"(the nodes have: {', '.join(sorted(have)[:5]) or 'no such label'})",
        kubectl("get", "nodes", flags=tuple(f"--label-columns={key}" for key in keys)),
        (*said(view.warning(claim)),),
    )


@cause(
    "claim-first-consumer-node-name",
    PersistentVolumeClaim,
    "A pod that sets nodeName skips the scheduler, which must choose",
    "Use a nodeSelector on kubernetes.io/hostname in place of nodeName.",
)
def first_consumer_node_name(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The class binds at the first consumer, and the pod that uses the claim names its node itself. Only the
    scheduler writes the chosen node on the claim, so provisioning never begins."""
    storage_class = needs_provisioning(view, claim)
    if not waits_for_consumer(storage_class) or SELECTED_NODE in claim.annotations:
        return None
    pinned = [p for p in view.pods_of(claim) if p.spec.node_name and not _was_scheduled(p)]
    if not pinned:
        return None
    pod = pinned[0]
    return Finding(
        f"its class waits for the scheduler to choose a node, and pod {pod.name} sets nodeName: {pod.spec.node_name}",
        in_words("recreate pod {} with nodeSelector kubernetes.io/hostname: {}", pod.name, pod.spec.node_name),
    )


@cause(
    "claim-first-consumer-no-pod",
    PersistentVolumeClaim,
    "The claim waits for a pod to use it",
    "Create a pod that uses the claim. This is how WaitForFirstConsumer classes work; nothing is wrong.",
)
def first_consumer_no_pod(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The class has volumeBindingMode WaitForFirstConsumer: a volume is made when a pod needs it, where that pod can
    run."""
    storage_class = needs_provisioning(view, claim)
    if not waits_for_consumer(storage_class) or SELECTED_NODE in claim.annotations or view.pods_of(claim):
        return None
    return Finding(
        "its class waits for the first pod that uses it, and no pod does",
        in_words("create a pod that uses claim {}", claim.name),
    )


@cause(
    "claim-first-consumer-unscheduled",
    PersistentVolumeClaim,
    "The pod that uses the claim has no node yet",
    "The explanation follows the pod.",
)
def first_consumer_unscheduled(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The class waits for the scheduler, and the scheduler has not found a node for the pod."""
    storage_class = needs_provisioning(view, claim)
    if not waits_for_consumer(storage_class) or SELECTED_NODE in claim.annotations:
        return None
    waiting: list[Pod] = [pod for pod in view.pods_of(claim) if not pod.spec.node_name]
    if not waiting:
        return None
    return Finding(f"it waits for pod {waiting[0].name} to be given a node", waits_for=waiting[0])


@cause(
    "claim-default-ambiguous",
    PersistentVolumeClaim,
    "Several storage classes are marked as the default, and the newest does not work",
    'Leave the annotation storageclass.kubernetes.io/is-default-class: "true" on one class only, and recreate the claim.',
)
def default_ambiguous(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """A claim that names no class gets the newest of the classes that are marked as default, which may not be the one
    that was meant. This is reported if that class cannot make a volume."""
    defaults, chosen = default_classes(view), needs_provisioning(view, claim)
    if (
        chosen is None
        or len(defaults) < 2
        or chosen is not default_class(view.classes.values())
        or _names_a_class(claim)
    ):
        return None
    problem = driver_not_installed(view, claim) or refused(view, claim) or provisioning_fails(view, claim)
    if problem is None:
        return None
    others = [each for each in defaults if each is not chosen]
    delete = kubectl("delete", "pvc", claim.name, namespace=claim.namespace)
    return Finding(
        f"{names(defaults)} are all marked as the default; it got {chosen.name}, the newest, and {problem.sentence}",
        kubectl("annotate", "storageclass", chosen.name, flags=("storageclass.kubernetes.io/is-default-class-",)),
        (*problem.evidence, f"other defaults: {names(others)}"),
        purpose=f"take the mark off {chosen.name}",
        then=(
            Advice(
                delete, "a claim keeps its class", f"deletes claim {claim.key}, which has no volume and no data yet"
            ),
            Advice(in_words("create claim {} again, as before", claim.name), "it then gets the other default"),
        ),
    )


@cause(
    "claim-driver-not-installed",
    PersistentVolumeClaim,
    "The class's driver is not installed",
    "Install the driver, or correct the provisioner of the class.",
)
def driver_not_installed(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The class names a provisioner that has neither a CSIDriver object nor an entry on any node, and none of its
    sidecars has ever held a lease."""
    storage_class = needs_provisioning(view, claim)
    if storage_class is None or storage_class.provisioner == NO_PROVISIONER:
        return None
    driver = storage_class.provisioner
    failed = view.warning(claim, "ProvisioningFailed")
    is_in_tree = failed is not None and "no volume plugin matched" in failed.message
    if view.is_installed(driver) or leases_of(view, driver) or (failed is not None and not is_in_tree):
        return None
    known = ", ".join(sorted(view.drivers)) or "none"
    return Finding(
        f"driver {driver} of class {storage_class.name} is not installed (installed: {known})",
        kubectl("get", "csidrivers,csinodes"),
    )


@cause(
    "claim-provisioner-not-leading",
    PersistentVolumeClaim,
    "The provisioner's leader has stopped renewing its lease",
    "Look at the provisioner's pod; another instance takes over when the lease has run out.",
)
def provisioner_not_leading(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The lease of the driver's provisioner exists and has expired: the process that led is gone or hangs."""
    driver = asked_of(claim)
    leases = leases_of(view, driver) if driver else []
    if not is_waiting(claim) or not leases or not is_leaderless(view, driver, "provisioner"):
        return None
    lease = leases[0]
    if view.said_since(claim, seconds_of(lease.spec.renew_time) or 0.0, "ProvisioningFailed", "Provisioning"):
        return None  # a provisioner without election is at work
    return Finding(
        f"the provisioner of {driver} has stopped: its lease, held by {lease.spec.holder_identity or 'no process'}, has run out",
        kubectl("get", "lease", lease.name, namespace=lease.namespace, flags=("-o", "yaml")),
    )


@cause(
    "claim-secret-missing",
    PersistentVolumeClaim,
    "A secret that the class names does not exist",
    "Create the secret, or correct the class's parameters (a class is immutable: delete and create it).",
)
def secret_missing(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The class's parameters name a secret for the driver that is not there."""
    storage_class = needs_provisioning(view, claim)
    if storage_class is None:
        return None
    parameters = storage_class.parameters
    for role in ("provisioner", "controller-publish", "node-stage", "node-publish", "controller-expand", "node-expand"):
        name = parameters.get(f"csi.storage.k8s.io/{role}-secret-name", "")
        namespace = parameters.get(f"csi.storage.k8s.io/{role}-secret-namespace", "")
        if name and view.asked_secrets.get(f"{namespace}/{name}") is False:
            return Finding(
                f"secret {namespace}/{name}, which class {storage_class.name} names, does not exist",
                kubectl("get", "secrets", namespace=namespace),
                said(view.warning(claim, "ProvisioningFailed")),
            )
    return None


@cause(
    "claim-no-capacity",
    PersistentVolumeClaim,
    "There is no room for a volume of that size",
    "Free space, add a pool, or ask for less. `moorage volume list` shows what holds the space.",
)
def no_capacity(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver answered RESOURCE_EXHAUSTED: no pool that the volume could live in has that much room."""
    event = view.warning(claim, "ProvisioningFailed")
    if not is_waiting(claim) or event is None or code_in(event.message) != "RESOURCE_EXHAUSTED":
        return None
    want, most = bytes_text(requested_bytes(claim)), most_room(view, claim)
    numbers = f"; {most}" if most else f": {driver_words(event.message)}"
    return Finding(f"the driver has no room for {want}{numbers}", show_room(), said(event))


@cause(
    "claim-size-impossible",
    PersistentVolumeClaim,
    "The driver can never make a volume of that size",
    "Ask for a size within the driver's limits; its words name them.",
)
def size_impossible(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver answered OUT_OF_RANGE: the size is below its smallest or above its largest, or below the source's."""
    event = view.warning(claim, "ProvisioningFailed")
    if not is_waiting(claim) or event is None or code_in(event.message) != "OUT_OF_RANGE":
        return None
    return Finding(
        f"the driver cannot make a volume of that size: {driver_words(event.message)}",
        in_words("recreate the claim with another size"),
        said(event),
    )


@cause(
    "claim-refused",
    PersistentVolumeClaim,
    "The driver refused what the class or claim asks for",
    "Correct the class's parameters or the claim; a class is immutable, so recreate it.",
)
def refused(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver answered INVALID_ARGUMENT: an unknown parameter, an access mode or a volume mode that it does not
    have. It is tried again only every five minutes."""
    event = view.warning(claim, "ProvisioningFailed")
    if not is_waiting(claim) or event is None or code_in(event.message) != "INVALID_ARGUMENT":
        return None
    return Finding(
        f"the driver refuses to make the volume: {driver_words(event.message)}",
        kubectl("get", "storageclass", claim_class(claim), flags=("-o", "yaml")),
        said(event),
    )


@cause(
    "claim-driver-lacks-capability",
    PersistentVolumeClaim,
    "The driver cannot do what the claim asks for",
    "Use a driver that can, or create the claim without a data source or VolumeAttributesClass.",
)
def driver_lacks_capability(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The driver does not announce the capability for clones, snapshots or attributes that the claim needs."""
    event = view.warning(claim, "ProvisioningFailed")
    signs = ("lacks the capability", "does not support")
    if not is_waiting(claim) or event is None or not any(sign in event.message for sign in signs):
        return None
    return Finding(
        f"driver {asked_of(claim)} cannot do what it asks for: {driver_words(event.message)}",
        kubectl("get", "pvc", claim.name, namespace=claim.namespace, flags=("-o", "yaml")),
        said(event),
    )


@cause(
    "claim-driver-silent",
    PersistentVolumeClaim,
    "The driver does not answer",
    "Look at the driver's process and its log; the call is repeated until it has an answer, so nothing is made twice.",
)
def driver_silent(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """CreateVolume ended by its deadline, or no process listens on the driver's socket."""
    event = view.warning(claim, "ProvisioningFailed")
    if not is_waiting(claim) or event is None or code_in(event.message) not in ("DEADLINE_EXCEEDED", "UNAVAILABLE"):
        return None
    crashed = exits_on(view, "")
    why = f" (its process {crashed})" if crashed else ""
    return Finding(
        f"driver {asked_of(claim)} does not answer{why}: {driver_words(event.message)}",
        pods_like("csi"),
        said(event),
    )


@cause(
    "claim-provisioning-fails",
    PersistentVolumeClaim,
    "Provisioning fails",
    "Read the driver's words; it is tried again with growing waits.",
)
def provisioning_fails(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """CreateVolume, or what comes before it, fails; the event holds the words of the driver or the provisioner."""
    event = view.warning(claim, "ProvisioningFailed", "ProvisioningCleanupFailed")
    if not is_waiting(claim) or event is None:
        return None
    return Finding(
        f"making its volume fails: {driver_words(event.message)}",
        kubectl("describe", "pvc", claim.name, namespace=claim.namespace),
        said(event),
    )


@cause(
    "claim-provisioner-not-running",
    PersistentVolumeClaim,
    "No provisioner works for the driver",
    "Start the driver's provisioner (`moorage sidecars provisioner --csi-address …`).",
)
def provisioner_not_running(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim has been handed to the driver's provisioner, and the provisioner has not said a word about it."""
    driver = asked_of(claim)
    if not is_waiting(claim) or not driver:
        return None
    if any(event.reason.startswith("Provisioning") for event in view.events_of(claim)):
        return None
    crashed = exits_on(view, "")
    why = f"the driver's process {crashed}" if crashed else "is it running?"
    return Finding(
        f"it was handed to the provisioner of {driver}, which has not answered; {why}",
        pods_like("provisioner"),
        said(_newest(view, claim)),
    )


@cause(
    "claim-provisioning",
    PersistentVolumeClaim,
    "The volume is being made",
    "Wait; the driver is at work.",
)
def provisioning(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The provisioner has begun and has not finished: the driver's CreateVolume is running, or a copy is under way."""
    if not is_waiting(claim) or not any(event.reason == "Provisioning" for event in view.events_of(claim)):
        return None
    return Finding(f"the provisioner of {asked_of(claim)} is making its volume", NOTHING, said(_newest(view, claim)))


@cause(
    "claim-binder-not-running",
    PersistentVolumeClaim,
    "No binder works in the cluster",
    "Start the binder (kube-controller-manager, or `moorage controllers binder`).",
)
def binder_not_running(view: ClusterView, claim: PersistentVolumeClaim) -> Finding | None:
    """The claim is Pending, has a class or a volume that fits, and no controller has said or written anything."""
    if not is_waiting(claim) or view.events_of(claim) or asked_of(claim):
        return None
    return Finding(
        "nothing has happened to it at all: the volume binder does not seem to run",
        kubectl("get", "leases,pods", namespace="kube-system"),
    )


def _was_scheduled(pod: Pod) -> bool:
    return any(condition.type == "PodScheduled" and condition.reason != "" for condition in pod.status.conditions)


def _names_a_class(claim: PersistentVolumeClaim) -> bool:
    """Whether the manifest that a person applied names the class; False if the manifest was not kept."""
    applied = claim.annotations.get("kubectl.kubernetes.io/last-applied-configuration", "")
    try:
        spec = json.loads(applied).get("spec") if applied else None
    except ValueError:
        return False
    return isinstance(spec, dict) and "storageClassName" in spec


def _newest(view: ClusterView, claim: PersistentVolumeClaim) -> Event | None:
    return next(iter(view.events_of(claim)), None)
