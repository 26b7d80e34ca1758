"""Pods: defaults, validation, what may change.

Owns: the rules of pods, and the defaults of pod templates.
May not touch: scheduling and running.
Start reading at: `POD`.
"""

from typing import Any

from moorage.apiserver.errors import FieldError, duplicate, forbidden_field, invalid, invalid_value, required
from moorage.apiserver.kinds.metadata import is_label, is_subdomain, now_text
from moorage.apiserver.kinds.rules.base import Object, Rules, check_node_selector, not_below_zero, one_of, quantity_of
from moorage.apiserver.kinds.rules.volumes import check_claim_spec, check_driver_name
from moorage.apiserver.kinds.schema import struct

CONTAINERS = ("initContainers", "containers", "ephemeralContainers")
VOLUME_SOURCES = tuple(name for name in struct("core.v1.Volume").fields if name != "name")


def default_pod_spec(spec: Object) -> None:
    """What Kubernetes fills in for every pod and template."""
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("dnsPolicy", "ClusterFirst")
    if spec.setdefault("terminationGracePeriodSeconds", 30) < 0:
        spec["terminationGracePeriodSeconds"] = 1
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    for volume in spec.get("volumes") or []:
        default_volume(volume)
    for part in CONTAINERS:
        for container in spec.get(part) or []:
            default_container(container)


def default_volume(volume: Object) -> None:
    if not any(name in volume for name in VOLUME_SOURCES):
        volume["emptyDir"] = {}
    if isinstance(volume.get("hostPath"), dict):
        volume["hostPath"].setdefault("type", "")
    for name in ("secret", "configMap", "downwardAPI", "projected"):
        if isinstance(volume.get(name), dict):
            volume[name].setdefault("defaultMode", 420)
    for source in (volume.get("projected") or {}).get("sources") or []:
        if "serviceAccountToken" in source:
            source["serviceAccountToken"].setdefault("expirationSeconds", 3600)
        _default_field_refs((source.get("downwardAPI") or {}).get("items"))
    _default_field_refs((volume.get("downwardAPI") or {}).get("items"))
    template = (volume.get("ephemeral") or {}).get("volumeClaimTemplate")
    if isinstance(template, dict):
        template.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")


def _default_field_refs(items: list[Object] | None) -> None:
    for item in items or []:
        if isinstance(item.get("fieldRef"), dict):
            item["fieldRef"].setdefault("apiVersion", "v1")
        if isinstance(item.get("resourceFieldRef"), dict):
            item["resourceFieldRef"].setdefault("divisor", "0")


def default_container(container: Object) -> None:
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    container.setdefault("resources", {})
    image = container.get("image", "")
    tag = image.rpartition("/")[2].partition(":")[2]
    container.setdefault("imagePullPolicy", "Always" if tag in ("", "latest") and "@" not in image else "IfNotPresent")
    for port in container.get("ports") or []:
        port.setdefault("protocol", "TCP")
    _default_field_refs([one["valueFrom"] for one in container.get("env") or [] if one.get("valueFrom")])
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container.get(name)
        if isinstance(probe, dict):
            for field, value in (("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1),
                                 ("failureThreshold", 3)):  # fmt: skip
                probe.setdefault(field, value)
            if isinstance(probe.get("grpc"), dict):
                probe["grpc"].setdefault("service", "")
    hooks = container.get("lifecycle") or {}
    for handler in (
        *(container.get(name) for name in ("livenessProbe", "readinessProbe", "startupProbe")),
        *(hooks.get(name) for name in ("postStart", "preStop")),
    ):
        if handler and isinstance(handler.get("httpGet"), dict):
            handler["httpGet"].setdefault("path", "/")
            handler["httpGet"].setdefault("scheme", "HTTP")


def _default_pod(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    default_pod_spec(spec)
    spec.setdefault("enableServiceLinks", True)
    for part in CONTAINERS:
        for container in spec.get(part) or []:
            _default_requests(container["resources"])
            for port in container.get("ports") or [] if spec.get("hostNetwork") else ():
                port.setdefault("hostPort", port.get("containerPort"))
    if name := spec.get("serviceAccountName") or spec.get("serviceAccount"):  # the second is the old name of the first
        spec["serviceAccount"] = spec["serviceAccountName"] = name


def _default_requests(resources: Object) -> None:
    """Who limits a resource and does not say how much is asked for, asks for all of it; a template does not."""
    if limits := resources.get("limits"):
        requests = resources.setdefault("requests", {})
        for key, value in limits.items():
            requests.setdefault(key, value)


def _create_pod(obj: Object) -> None:
    if obj["spec"].get("ephemeralContainers"):
        why = "ephemeral containers not allowed in create pod requests"
        error = forbidden_field("spec.ephemeralContainers", why)
        raise invalid("Pod", "", obj["metadata"].get("name", ""), [error])
    obj["status"] = {"phase": "Pending", "qosClass": qos_class(obj["spec"])}


def _update_pod(new: Object, old: Object) -> None:
    new.setdefault("status", {})


def _status_of_pod(new: Object, old: Object) -> None:
    new.setdefault("status", {})
    if "qosClass" in (old.get("status") or {}):
        new["status"].setdefault("qosClass", old["status"]["qosClass"])


def qos_class(spec: Object) -> str:
    """Guaranteed, Burstable or BestEffort, by the containers' cpu and memory."""
    has_any, is_guaranteed = False, True
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        for name in ("cpu", "memory"):
            has_any = has_any or name in limits or name in requests
            same = (
                name in limits
                and quantity_of("", limits[name])[0] == quantity_of("", requests.get(name, limits[name]))[0]
            )
            is_guaranteed = is_guaranteed and same
    if not has_any:
        return "BestEffort"
    return "Guaranteed" if is_guaranteed else "Burstable"


def _check_pod(obj: Object) -> list[FieldError]:
    spec = obj.get("spec") or {}
    errors = _check_volumes(spec.get("volumes") or [])
    names = [volume.get("name") for volume in spec.get("volumes") or []]
    if not spec.get("containers"):
        errors.append(required("spec.containers"))
    seen: list[str] = []
    for part in CONTAINERS:
        for at, container in enumerate(spec.get(part) or []):
            errors += _check_container(f"spec.{part}[{at}]", container, names, seen)
    errors += one_of("spec.restartPolicy", spec.get("restartPolicy"), ("Always", "Never", "OnFailure"))
    errors += one_of(
        "spec.dnsPolicy", spec.get("dnsPolicy"), ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")
    )
    for name in ("nodeName", "serviceAccountName"):
        if spec.get(name) and not is_subdomain(spec[name]):
            errors.append(invalid_value(f"spec.{name}", spec[name], "must be a DNS subdomain"))
    node = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if node is not None:
        where = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
        errors += check_node_selector(where, node)
    return errors


def _check_volumes(volumes: list[Object]) -> list[FieldError]:
    errors: list[FieldError] = []
    seen = set()
    for at, volume in enumerate(volumes):
        where, name = f"spec.volumes[{at}]", volume.get("name", "")
        if not name:
            errors.append(required(f"{where}.name"))
        elif not is_label(name):
            errors.append(invalid_value(f"{where}.name", name, "must be a DNS label"))
        if name in seen:
            errors.append(duplicate(f"{where}.name", name))
        seen.add(name)
        found = [source for source in VOLUME_SOURCES if source in volume]
        if len(found) > 1:
            errors.append(forbidden_field(f"{where}.{found[1]}", "may not specify more than 1 volume type"))
        claim = volume.get("persistentVolumeClaim")
        if claim is not None and not claim.get("claimName"):
            errors.append(required(f"{where}.persistentVolumeClaim.claimName"))
        size = (volume.get("emptyDir") or {}).get("sizeLimit", "0")
        if not_below_zero("", size):
            why = "SizeLimit field must be a valid resource quantity"
            errors.append(forbidden_field(f"{where}.emptyDir.sizeLimit", why))
        if volume.get("csi") is not None:
            errors += check_driver_name(f"{where}.csi.driver", volume["csi"].get("driver", ""))
        template = (volume.get("ephemeral") or {}).get("volumeClaimTemplate")
        if volume.get("ephemeral") is not None and template is None:
            errors.append(required(f"{where}.ephemeral.volumeClaimTemplate"))
        elif template is not None:
            errors += check_claim_spec(template.get("spec") or {}, f"{where}.ephemeral.volumeClaimTemplate.spec")
    return errors


def _check_container(where: str, container: Object, volumes: list[Any], seen: list[str]) -> list[FieldError]:
    name = container.get("name", "")
    errors: list[FieldError] = []
    if not name:
        errors.append(required(f"{where}.name"))
    elif not is_label(name):
        errors.append(invalid_value(f"{where}.name", name, "must be a DNS label"))
    if name in seen:
        errors.append(duplicate(f"{where}.name", name))
    seen.append(name)
    if not container.get("image", "").strip():
        errors.append(required(f"{where}.image"))
    paths = set()
    for part, field in (("volumeMounts", "mountPath"), ("volumeDevices", "devicePath")):
        for at, mount in enumerate(container.get(part) or []):
            spot = f"{where}.{part}[{at}]"
            if mount.get("name") not in volumes:
                errors.append(FieldError("FieldValueNotFound", f"{spot}.name", f'Not found: "{mount.get("name", "")}"'))
            if not mount.get(field):
                errors.append(required(f"{spot}.{field}"))
            elif mount[field] in paths:
                errors.append(invalid_value(f"{spot}.{field}", mount[field], "must be unique"))
            paths.add(mount.get(field))
    for group, amounts in (container.get("resources") or {}).items():
        for key, value in amounts.items() if isinstance(amounts, dict) else ():
            errors += not_below_zero(f"{where}.resources.{group}[{key}]", value)
    return errors


_MUTABLE = (
    "activeDeadlineSeconds",
    "tolerations",
    "terminationGracePeriodSeconds",
    "schedulingGates",
)


def _check_pod_update(new: Object, old: Object) -> list[FieldError]:
    """Of a pod's spec only images, tolerations that are added, and a few numbers may change."""
    spec, before = _frozen(new.get("spec") or {}), _frozen(old.get("spec") or {})
    errors: list[FieldError] = []
    kept = [
        t
        for t in (old.get("spec") or {}).get("tolerations") or []
        if t not in ((new.get("spec") or {}).get("tolerations") or [])
    ]
    if kept and not all("tolerationSeconds" in t for t in kept):
        errors.append(
            forbidden_field("spec.tolerations", "existing toleration can not be modified except its tolerationSeconds")
        )
    gates = (new.get("spec") or {}).get("schedulingGates") or []
    added = [g for g in gates if g not in ((old.get("spec") or {}).get("schedulingGates") or [])]
    if added:
        errors.append(forbidden_field("spec.schedulingGates", "only deletion is allowed"))
    if spec != before:
        errors.append(
            forbidden_field(
                "spec",
                "pod updates may not change fields other than `spec.containers[*].image`, "
                "`spec.initContainers[*].image`, `spec.activeDeadlineSeconds`, `spec.tolerations` (only additions to "
                "existing tolerations), `spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
                "previously negative)",
            )
        )
    return errors


def _frozen(spec: Object) -> Object:
    kept = {key: value for key, value in spec.items() if key not in _MUTABLE}
    for part in ("containers", "initContainers"):
        if part in kept:
            kept[part] = [{key: value for key, value in c.items() if key != "image"} for c in kept[part]]
    return kept


def _check_pod_status(new: Object, old: Object) -> list[FieldError]:
    """What has ended and is not to be restarted stays so."""
    spec, errors = old.get("spec") or {}, []
    every = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    if any(
        rule.get("action") == "RestartAllContainers" for one in every for rule in one.get("restartPolicyRules") or []
    ):
        return []
    for part, statuses in (("containers", "containerStatuses"), ("initContainers", "initContainerStatuses")):
        named = {one.get("name"): one for one in spec.get(part) or []}
        told = {one.get("name"): one.get("state") or {} for one in (new.get("status") or {}).get(statuses) or []}
        for at, before in enumerate((old.get("status") or {}).get(statuses) or []):
            name, ended = before.get("name"), (before.get("state") or {}).get("terminated")
            if ended is None or name not in told or told[name].get("terminated") is not None:
                continue
            if name not in named or not _restarts(named[name], spec, ended.get("exitCode", 0)):
                why = "may not be transitioned to non-terminated state"
                errors.append(forbidden_field(f"status.{statuses}[{at}].state", why))
    return errors


def _restarts(container: Object, spec: Object, exit_code: int) -> bool:
    """A container's rules count before its policy, and that before its pod's."""
    policy = container.get("restartPolicy")
    for rule in container.get("restartPolicyRules") or [] if policy else ():
        codes = rule.get("exitCodes") or {}
        is_listed = exit_code in (codes.get("values") or ())
        if rule.get("action") == "Restart" and is_listed == (codes.get("operator") == "In"):
            return True
    policy = policy or spec.get("restartPolicy")
    return policy not in ("Never", "OnFailure") or (policy == "OnFailure" and exit_code != 0)


def scheduled_condition() -> Object:
    return {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": now_text()}


POD = Rules(
    default=_default_pod,
    on_create=_create_pod,
    on_update=_update_pod,
    on_status=_status_of_pod,
    check=_check_pod,
    check_update=_check_pod_update,
    check_status=_check_pod_status,
)
