"""The small kinds of the core group and their neighbours: defaults and the checks that clients rely on.

Owns: Namespace, Node, Secret, ConfigMap, Service, Event, Lease, ResourceQuota, PriorityClass, the workload kinds.
May not touch: pods and volumes, which have modules of their own.
Start reading at: the rules at the end.
"""

import base64
import binascii

from moorage.apiserver.errors import FieldError, forbidden_field, invalid_value, required, too_long
from moorage.apiserver.kinds.rules.base import Object, Rules, not_below_zero, one_of, unchanged
from moorage.apiserver.kinds.rules.pods import default_pod_spec

LIMIT_BYTES = 1 << 20


def _default_namespace(obj: Object) -> None:
    labels = obj["metadata"].setdefault("labels", {})
    labels["kubernetes.io/metadata.name"] = obj["metadata"].get("name", "")
    obj.setdefault("status", {}).setdefault("phase", "Active")


def _create_namespace(obj: Object) -> None:
    finalizers = obj.setdefault("spec", {}).setdefault("finalizers", [])
    if "kubernetes" not in finalizers:
        finalizers.append("kubernetes")
    obj["status"] = {"phase": "Active"}


def _update_namespace(new: Object, old: Object) -> None:
    new["spec"] = old.get("spec") or {}
    new["status"] = old.get("status") or {}


def _create_node(obj: Object) -> None:
    obj.setdefault("status", {})


def _update_node(new: Object, old: Object) -> list[FieldError]:
    had, has = (old.get("spec") or {}).get("podCIDR"), (new.get("spec") or {}).get("podCIDR")
    if had and has != had:
        return [forbidden_field("spec.podCIDR", 'node updates may not change podCIDR except from "" to valid')]
    had, has = (old.get("spec") or {}).get("providerID"), (new.get("spec") or {}).get("providerID")
    if had and has != had:
        return [forbidden_field("spec.providerID", 'node updates may not change providerID except from "" to valid')]
    return []


def _default_secret(obj: Object) -> None:
    obj.setdefault("type", "Opaque")
    plain = obj.pop("stringData", None) or {}
    if plain:
        data = obj.setdefault("data", {})
        for key, value in plain.items():
            data[key] = base64.b64encode(value.encode()).decode()


def _check_data(obj: Object) -> list[FieldError]:
    errors: list[FieldError] = []
    total = 0
    for field in ("data", "binaryData"):
        for key, value in (obj.get(field) or {}).items():
            if len(key) > 253 or not key or any(not (c.isalnum() or c in "-_.") for c in key) or key in (".", ".."):
                why = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"
                errors.append(invalid_value(f"{field}[{key}]", key, why))
            total += len(value)
            if field == "binaryData" or obj["kind"] == "Secret":
                try:
                    base64.b64decode(value, validate=True)
                except (binascii.Error, ValueError):
                    errors.append(invalid_value(f"{field}[{key}]", "<secret>", "illegal base64 data"))
    if total > LIMIT_BYTES * 4 // 3:
        errors.append(too_long("data", LIMIT_BYTES))
    return errors


def _update_data(new: Object, old: Object) -> list[FieldError]:
    errors: list[FieldError] = []
    if old.get("immutable"):
        changed = [field for field in ("data", "binaryData") if new.get(field) != old.get(field)]
        errors += [forbidden_field(field, "field is immutable when `immutable` is set") for field in changed]
        if not new.get("immutable"):
            errors.append(forbidden_field("immutable", "field is immutable when `immutable` is set"))
    if new["kind"] == "Secret":
        errors += unchanged("type", new.get("type"), old.get("type"))
    return errors


def _default_service(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    if spec["type"] != "ExternalName":
        spec.setdefault("clusterIP", "None")
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
        spec.setdefault("internalTrafficPolicy", "Cluster")
        spec.setdefault("ipFamilies", ["IPv4"])
        spec.setdefault("ipFamilyPolicy", "SingleStack")
    for port in spec.get("ports") or []:
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port.get("port"))
    obj.setdefault("status", {}).setdefault("loadBalancer", {})


def _check_service(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    errors = one_of("spec.type", spec.get("type"), ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort"))
    if not spec.get("ports") and spec.get("type") != "ExternalName" and spec.get("clusterIP") != "None":
        errors.append(required("spec.ports"))
    for at, port in enumerate(spec.get("ports") or []):
        if not 1 <= (port.get("port") or 0) <= 65535:
            errors.append(
                invalid_value(f"spec.ports[{at}].port", port.get("port"), "must be between 1 and 65535, inclusive")
            )
    return errors


def _check_event(obj: Object) -> list[FieldError]:
    errors: list[FieldError] = []
    about = (obj.get("involvedObject") or {}).get("namespace") or "default"
    have = obj["metadata"].get("namespace")
    if about != have and not (about == "default" and have in ("default", "kube-system")):
        errors.append(invalid_value("involvedObject.namespace", about, "does not match event.namespace"))
    return errors


def _check_lease(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    errors: list[FieldError] = []
    seconds, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
    if seconds is not None and seconds <= 0:
        errors.append(invalid_value("spec.leaseDurationSeconds", seconds, "must be greater than 0"))
    if transitions is not None and transitions < 0:
        errors.append(invalid_value("spec.leaseTransitions", transitions, "must be greater than or equal to 0"))
    return errors


def _check_quota(obj: Object) -> list[FieldError]:
    hard = (obj.get("spec") or {}).get("hard") or {}
    return [error for key, value in hard.items() for error in not_below_zero(f"spec.hard[{key}]", value)]


def _default_priority(obj: Object) -> None:
    obj.setdefault("preemptionPolicy", "PreemptLowerPriority")


def _update_priority(new: Object, old: Object) -> list[FieldError]:
    errors = unchanged("preemptionPolicy", new.get("preemptionPolicy"), old.get("preemptionPolicy"))
    if new.get("value", 0) != old.get("value", 0):
        errors.append(forbidden_field("value", "may not be changed in an update."))
    return errors


def _default_workload(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    if obj["kind"] in ("Deployment", "ReplicaSet", "StatefulSet", "ReplicationController"):
        spec.setdefault("replicas", 1)
    if obj["kind"] == "Deployment":
        spec.setdefault("strategy", {})
        if not spec["strategy"].get("type"):
            rolling = {"maxSurge": "25%", "maxUnavailable": "25%"}
            spec["strategy"] = {"type": "RollingUpdate", "rollingUpdate": rolling}
        spec.setdefault("revisionHistoryLimit", 10)
        spec.setdefault("progressDeadlineSeconds", 600)
    if obj["kind"] in ("DaemonSet", "StatefulSet"):
        spec.setdefault("updateStrategy", {})
        if not spec["updateStrategy"].get("type"):
            steps: Object = {"maxSurge": 0, "maxUnavailable": 1} if obj["kind"] == "DaemonSet" else {"partition": 0}
            spec["updateStrategy"] = {"type": "RollingUpdate", "rollingUpdate": steps}
        spec.setdefault("revisionHistoryLimit", 10)
    if obj["kind"] == "StatefulSet":
        spec.setdefault("podManagementPolicy", "OrderedReady")
        keep = {"whenDeleted": "Retain", "whenScaled": "Retain"}
        spec.setdefault("persistentVolumeClaimRetentionPolicy", keep)
    template = spec.get("template")
    if isinstance(template, dict) and isinstance(template.get("spec"), dict):
        default_pod_spec(template["spec"])


def _check_workload(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    errors: list[FieldError] = []
    if obj["kind"] not in ("Job", "CronJob") and not spec.get("selector"):
        errors.append(required("spec.selector"))
    replicas = spec.get("replicas", 0)
    if replicas < 0:
        errors.append(invalid_value("spec.replicas", replicas, "must be greater than or equal to 0"))
    labels = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    wanted = (spec.get("selector") or {}).get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        why = "`selector` does not match template `labels`"
        errors.append(invalid_value("spec.template.metadata.labels", labels, why))
    return errors


def _update_workload(new: Object, old: Object) -> list[FieldError]:
    return unchanged("spec.selector", (new.get("spec") or {}).get("selector"), (old.get("spec") or {}).get("selector"))


def _update_binding(new: Object, old: Object) -> list[FieldError]:
    if new.get("roleRef") != old.get("roleRef"):
        return [invalid_value("roleRef", new.get("roleRef"), "cannot change roleRef")]
    return []


def _check_binding(obj: Object) -> list[FieldError]:
    ref = obj.get("roleRef") or {}
    errors = one_of("roleRef.kind", ref.get("kind"), ("ClusterRole", "Role"))
    return errors + ([] if ref.get("name") else [required("roleRef.name")])


def _default_binding(obj: Object) -> None:
    obj.setdefault("roleRef", {}).setdefault("apiGroup", "rbac.authorization.k8s.io")
    for subject in obj.get("subjects") or []:
        if subject.get("kind") in ("User", "Group"):
            subject.setdefault("apiGroup", "rbac.authorization.k8s.io")


NAMESPACE = Rules(
    name_rule="label", default=_default_namespace, on_create=_create_namespace, on_update=_update_namespace
)
NODE = Rules(on_create=_create_node, check_update=_update_node)
SECRET = Rules(default=_default_secret, check=_check_data, check_update=_update_data)
CONFIG_MAP = Rules(check=_check_data, check_update=_update_data)
SERVICE = Rules(name_rule="label", default=_default_service, check=_check_service)
EVENT = Rules(check=_check_event)
LEASE = Rules(check=_check_lease)
RESOURCE_QUOTA = Rules(check=_check_quota)
PRIORITY_CLASS = Rules(default=_default_priority, check_update=_update_priority)
WORKLOAD = Rules(default=_default_workload, check=_check_workload, check_update=_update_workload)
JOB = Rules(default=_default_workload, check=_check_workload)
ROLE = Rules(name_rule="path")
ROLE_BINDING = Rules(name_rule="path", default=_default_binding, check=_check_binding, check_update=_update_binding)
