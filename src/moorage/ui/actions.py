"""What the page may do when the user started it with --allow-actions: each action, its kubectl command, its refusal.

Owns: every write. An action is first a plan, which the user sees as a command and confirms; a plan that would lose data
or end in a stuck object is refused, with the reason.
Start reading at: `Actions.plan`.
"""

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moorage.errors import UsageError
from moorage.insight.explain import ObjectNotFound
from moorage.kube.api.client import Client
from moorage.kube.objects import KubeObject, PersistentVolume, PersistentVolumeClaim, VolumeSnapshot
from moorage.kube.quantity import bytes_of
from moorage.kube.volumes import requested_bytes
from moorage.suggest import Command, kubectl
from moorage.ui.live_view import LiveView

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_SIZE = re.compile(r"[0-9]{1,15}(Ki|Mi|Gi|Ti)?")
_CORE, _SNAPSHOT = "", "snapshot.storage.k8s.io"


@dataclass(frozen=True)
class FormField:
    """One thing that the user fills in."""

    name: str
    label: str
    value: str


@dataclass(frozen=True)
class Plan:
    """One action: what it does, the command that does the same, and what speaks against it."""

    title: str
    command: Command
    verb: str
    target: KubeObject
    then: str  # the page to go to afterwards
    fields: list[FormField] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)  # the manifest to create, or the patch
    kind: type[KubeObject] = PersistentVolumeClaim
    warning: str = ""
    refusal: str = ""


class Actions:
    """Plans actions from the current view, and carries them out with the user's own rights."""

    def __init__(self, client: Client, view: LiveView) -> None:
        self._client, self._view = client, view

    def plan(self, verb: str, word: str, namespace: str, name: str, sent: dict[str, str]) -> Plan:
        """Return what an action would do. Raises ObjectNotFound or UsageError."""
        match verb, word:
            case "snapshot", "pvc":
                return self._snapshot(self._claim(namespace, name), sent)
            case ("clone", "pvc") | ("restore", "snapshot"):
                return self._copy(verb, word, namespace, name, sent)
            case "grow", "pvc":
                return self._grow(self._claim(namespace, name), sent)
            case "recover", "pv":
                return self._recover(name)
            case "delete", "pvc":
                return self._delete_claim(self._claim(namespace, name))
            case "delete", "snapshot":
                snapshot = self._snapshot_named(namespace, name)
                command = kubectl("delete", "volumesnapshot", name, namespace=namespace)
                return Plan(
                    "Delete snapshot",
                    command,
                    "delete",
                    snapshot,
                    "/snapshots",
                    warning="The snapshot's data goes with it.",
                )
        raise UsageError(f"{verb} {word}: there is no such action")

    async def carry_out(self, plan: Plan) -> None:
        """Do what a plan says. Raises ApiError."""
        target = plan.target
        if plan.verb == "create":
            await self._client.create(plan.kind, plan.body, target.namespace)
        elif plan.verb == "patch":
            await self._client.patch(
                type(target), target.name, plan.body, target.namespace, version=target.metadata.resource_version
            )
        else:
            await self._client.delete(type(target), target.name, target.namespace, uid=target.uid)

    def _snapshot(self, claim: PersistentVolumeClaim, sent: dict[str, str]) -> Plan:
        name = _name(sent, f"{claim.name[:40]}-{secrets.token_hex(3)}")
        body = _manifest(
            "snapshot.storage.k8s.io/v1",
            "VolumeSnapshot",
            name,
            claim.namespace,
            {"source": {"persistentVolumeClaimName": claim.name}},
        )
        refusal = (
            ""
            if claim.status.phase == "Bound"
            else "the claim is not bound yet: there is nothing to take a snapshot of"
        )
        return _create("Take a snapshot", claim, VolumeSnapshot, body, name, "snapshot", refusal)

    def _copy(self, verb: str, word: str, namespace: str, name: str, sent: dict[str, str]) -> Plan:
        """A clone of a claim or a restore of a snapshot: a new claim with a source."""
        source: KubeObject = self._claim(namespace, name) if word == "pvc" else self._snapshot_named(namespace, name)
        origin = source if isinstance(source, PersistentVolumeClaim) else self._origin(source)
        new = _name(sent, f"{name[:40]}-{verb}")
        reference: dict[str, Any] = {"kind": source.resource.kind, "name": name}
        if word == "snapshot":
            reference["apiGroup"] = _SNAPSHOT
        size = requested_bytes(origin) if origin is not None else 0
        if isinstance(source, VolumeSnapshot) and source.status is not None and source.status.restore_size:
            size = max(size, bytes_of(str(source.status.restore_size)))
        spec: dict[str, Any] = {
            "accessModes": list(origin.spec.access_modes) if origin is not None else ["ReadWriteOnce"],
            "resources": {"requests": {"storage": str(size)}},
            "dataSource": reference,
        }
        if origin is not None:
            spec["storageClassName"] = origin.spec.storage_class_name
            spec["volumeMode"] = origin.spec.volume_mode or "Filesystem"
        refusal = "" if size else "its size is not known yet"
        if isinstance(source, VolumeSnapshot) and not (source.status is not None and source.status.ready_to_use):
            refusal = "the snapshot is not ready yet"
        body = _manifest("v1", "PersistentVolumeClaim", new, namespace, spec)
        title = "Clone the volume" if verb == "clone" else "Restore the snapshot"
        return _create(title, source, PersistentVolumeClaim, body, new, "pvc", refusal)

    def _origin(self, snapshot: KubeObject) -> PersistentVolumeClaim | None:
        assert isinstance(snapshot, VolumeSnapshot)
        return self._view.claims.get(f"{snapshot.namespace}/{snapshot.spec.source.persistent_volume_claim_name}")

    def _grow(self, claim: PersistentVolumeClaim, sent: dict[str, str]) -> Plan:
        old = requested_bytes(claim)
        size = sent.get("size", f"{max(1, old * 3 // 2 >> 20)}Mi")
        if not _SIZE.fullmatch(size):
            raise UsageError("the size must be a number with Mi, Gi or Ti behind it")
        body = {"spec": {"resources": {"requests": {"storage": size}}}}
        storage_class = self._view.classes.get(claim.spec.storage_class_name or "")
        refusal = ""
        if bytes_of(size) <= old:
            refusal = "a volume can only grow: choose a larger size"
        elif storage_class is not None and not storage_class.allow_volume_expansion:
            refusal = f"class {storage_class.name} does not allow volumes to grow (allowVolumeExpansion)"
        command = kubectl(
            "patch", "pvc", claim.name, namespace=claim.namespace, flags=("-p", msgspec.json.encode(body).decode())
        )
        fields = [FormField("size", "New size", size)]
        return Plan(
            "Grow the volume",
            command,
            "patch",
            claim,
            _page(claim, "pvc"),
            fields,
            body,
            refusal=refusal,
            warning="A volume cannot become smaller again.",
        )

    def _recover(self, name: str) -> Plan:
        volume = self._view.volumes.get(name)
        if volume is None:
            raise ObjectNotFound(f"there is no pv/{name}")
        body = {"spec": {"claimRef": None}}
        command = kubectl("patch", "pv", name, flags=("--type=merge", "-p", '{"spec":{"claimRef":null}}'))
        refusal = (
            ""
            if volume.status.phase == "Released"
            else f"it is {volume.status.phase}; only a released volume can be recovered"
        )
        if volume.spec.persistent_volume_reclaim_policy == "Delete":
            refusal = refusal or "its reclaim policy is Delete: it is about to be deleted"
        warning = "Its data stays. The volume becomes available to any claim of its class that fits."
        return Plan(
            "Recover the volume",
            command,
            "patch",
            volume,
            f"/o/pv/-/{name}",
            [],
            body,
            PersistentVolume,
            warning,
            refusal,
        )

    def _delete_claim(self, claim: PersistentVolumeClaim) -> Plan:
        users = [pod.name for pod in self._view.pods_of(claim)]
        volume = self._view.volumes.get(claim.spec.volume_name)
        keeps = volume is None or volume.spec.persistent_volume_reclaim_policy != "Delete"
        refusal = f"it is used by {', '.join(users[:3])}: it would be stuck as Terminating" if users else ""
        warning = (
            "The volume's data stays: its policy is Retain."
            if keeps
            else "The volume and its data are deleted with it."
        )
        command = kubectl("delete", "pvc", claim.name, namespace=claim.namespace)
        return Plan("Delete the claim", command, "delete", claim, "/claims", warning=warning, refusal=refusal)

    def _claim(self, namespace: str, name: str) -> PersistentVolumeClaim:
        found = self._view.claims.get(f"{namespace}/{name}")
        if found is None:
            raise ObjectNotFound(f"there is no pvc/{name} in namespace {namespace}")
        return found

    def _snapshot_named(self, namespace: str, name: str) -> VolumeSnapshot:
        found = self._view.snapshots.get(f"{namespace}/{name}")
        if found is None:
            raise ObjectNotFound(f"there is no snapshot/{name} in namespace {namespace}")
        return found


def _create(
    title: str, target: KubeObject, kind: type[KubeObject], body: dict[str, Any], name: str, word: str, refusal: str
) -> Plan:
    text = msgspec.json.encode(body).decode()
    command = Command(f"kubectl create -f - <<'EOF'\n{text}\nEOF")
    fields = [FormField("name", "Name", name)]
    return Plan(
        title, command, "create", target, f"/o/{word}/{target.namespace}/{name}", fields, body, kind, refusal=refusal
    )


def _manifest(version: str, kind: str, name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def _name(sent: dict[str, str], otherwise: str) -> str:
    name = sent.get("name", otherwise.strip("-."))
    if not _NAME.fullmatch(name):
        raise UsageError(
            "the name must be lower case letters, digits, - and ., and begin and end with a letter or digit"
        )
    return name


def _page(obj: KubeObject, word: str) -> str:
    return f"/o/{word}/{obj.namespace}/{obj.name}"
