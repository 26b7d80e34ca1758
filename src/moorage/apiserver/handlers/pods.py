"""What can be done to pods beside the plain verbs: binding, eviction, and changes through subresources.

Owns: the pod subresources that change objects; also the scale subresource and namespaces/finalize. Logs and exec go to
the node, through `node_proxy`.
Start reading at: `PodVerbs.answer`.
"""

import copy
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import msgspec

from moorage.apiserver.access.authentication import User
from moorage.apiserver.errors import (
    FieldError,
    bad_request,
    conflict,
    forbidden_field,
    invalid,
    method_not_allowed,
    no_such_path,
    not_found,
    too_many,
)
from moorage.apiserver.handlers.objects import patch_function
from moorage.apiserver.kinds.metadata import check_metadata, is_subdomain
from moorage.apiserver.kinds.registry import Kind, KindRegistry, Object
from moorage.apiserver.kinds.rules import rules_for
from moorage.apiserver.kinds.rules.pods import default_container, qos_class, scheduled_condition
from moorage.apiserver.request.apart import PATCHED_BYTES, apart
from moorage.apiserver.request.messages import Answer, Sent
from moorage.apiserver.request.options import Call, Options, delete_options_from
from moorage.apiserver.request.routes import Route
from moorage.apiserver.store.store import Transaction, decode, encode
from moorage.apiserver.writing.decoding import intake
from moorage.apiserver.writing.operations import Operations, check_preconditions
from moorage.kube.objects.meta import LabelSelector
from moorage.kube.selectors import LabelMatch

_SUCCESS = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


class PodVerbs:
    """Answers for the subresources that change objects in their own way."""

    def __init__(self, resources: Operations, registry: KindRegistry) -> None:
        self._resources = resources
        self._registry = registry

    def answer(self, route: Route, call: Call | None, sent: Sent, _user: User) -> Awaitable[Answer] | None:
        """The answer when the route is one of these; None when it is not."""
        if (route.group, route.plural, route.name) == ("", "bindings", "") and sent.method == "POST":
            return self._bind(route.namespace, _document(sent), None, call)
        if call is None or not route.subresource:
            return None
        match call.kind.stored_as, route.subresource:
            case "pods", "binding":
                return self._bind(route.namespace, _document(sent), route.name, call)
            case "pods", "eviction":
                return self._evict(call, _document(sent))
            case "pods", "ephemeralcontainers" | "resize":
                return self._part(call, sent)
            case "namespaces", "finalize":
                return self._finalize(call, _document(sent))
            case _, "scale" if call.kind.has_scale:
                return self._scale(call, sent)
        return None

    async def _bind(self, namespace: str, body: Any, name: str | None, call: Call | None) -> Answer:
        """What a scheduler does: give an unscheduled pod its node."""
        kind = self._registry.find("", "v1", "pods")
        assert kind is not None
        if not isinstance(body, dict) or not isinstance(body.get("metadata") or {}, dict):
            raise bad_request("Binding must be an object")
        meta, target = body.get("metadata") or {}, body.get("target") or {}
        name = name or str(meta.get("name") or "")
        node = target.get("name") if isinstance(target, dict) else None
        if not isinstance(node, str) or not node or target.get("kind") not in ("", None, "Node"):
            raise bad_request("target.name: Required value: a Binding names a Node")
        if meta.get("name") not in (None, "", name):
            raise bad_request("name in URL does not match name in Binding object")
        if not is_subdomain(node):
            raise bad_request("target.name: Invalid value: must be a DNS subdomain")
        for part in ("annotations", "labels"):
            if not isinstance(meta.get(part) or {}, dict):
                raise bad_request(f"metadata.{part}: Invalid value: must be a map")

        def bound(pod: Object, _txn: Transaction) -> Object:
            spec, status = pod["spec"], pod.setdefault("status", {})
            if meta.get("uid") and meta["uid"] != pod["metadata"]["uid"]:
                raise conflict("pods", "", name, f"Precondition failed: UID in precondition: {meta['uid']}")
            if pod["metadata"].get("deletionTimestamp"):
                raise conflict("pods/binding", "", name, f"pod {name} is being deleted, cannot be assigned to a host")
            if spec.get("nodeName"):
                why = f"pod {name} is already assigned to node {spec['nodeName']!r}"
                raise conflict("pods/binding", "", name, why.replace("'", '"'))
            if spec.get("schedulingGates"):
                raise conflict("pods/binding", "", name, f"pod {name} has non-empty .spec.schedulingGates")
            spec["nodeName"] = node
            kept = [c for c in status.get("conditions") or [] if c.get("type") != "PodScheduled"]
            status["conditions"] = [*kept, scheduled_condition()]
            for part in ("annotations", "labels"):
                if meta.get(part):
                    pod["metadata"][part] = {**(pod["metadata"].get(part) or {}), **meta[part]}
            errors = check_metadata(pod["metadata"], rules_for("pods").name_rule)
            if errors:
                raise invalid("Pod", "", name, errors)
            return pod

        options = call.options if call else Options()
        await self._write(Call(kind, namespace, name, "binding", options), bound)
        return Answer(encode({**_SUCCESS, "code": 201}), 201)

    async def _write(self, call: Call, change: Any) -> bytes:
        """Change an object without the rules that hold for clients."""

        def work(txn: Transaction) -> bytes:
            record = txn.get(call.kind.stored_as, call.namespace, call.name)
            if record is None:
                raise not_found(call.kind.plural, call.kind.group, call.name)
            new = change(decode(record.body), txn)
            if call.options.is_dry_run:
                return record.body
            return txn.put(call.kind.stored_as, call.namespace, call.name, new).body

        return await self._resources.store.write(work)

    async def _evict(self, call: Call, body: Any) -> Answer:
        """Delete a pod unless a disruption budget forbids it."""
        body = body if isinstance(body, dict) else {}
        meta = body.get("metadata") or {}
        if not isinstance(meta, dict) or meta.get("name") not in (None, "", call.name):
            raise bad_request("name in URL does not match name in Eviction object")
        record = self._resources.store.get("pods", call.namespace, call.name)
        if record is None:
            raise not_found("pods", "", call.name)
        pod = decode(record.body)
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed", "Pending"):
            self._check_budgets(pod)
        options = delete_options_from(body.get("deleteOptions") or {}, {})
        options.is_dry_run = options.is_dry_run or call.options.is_dry_run
        await self._resources.delete(Call(call.kind, call.namespace, call.name, "", call.options), options)
        return Answer(encode({**_SUCCESS, "code": 201}), 201)

    def _check_budgets(self, pod: Object) -> None:
        labels = pod["metadata"].get("labels") or {}
        for budget in self._resources.store.objects("poddisruptionbudgets.policy", pod["metadata"]["namespace"]):
            selector = (budget.get("spec") or {}).get("selector")
            if selector is None:
                continue
            if not LabelMatch.of(msgspec.convert(selector, LabelSelector)).matches(labels):
                continue
            if int((budget.get("status") or {}).get("disruptionsAllowed") or 0) <= 0:
                raise too_many("Cannot evict pod as it would violate the pod's disruption budget.", 10)

    async def _part(self, call: Call, sent: Sent) -> Answer:
        """Change the part of a pod's spec that a subresource is for. Other changes are dropped, as in Kubernetes."""
        if sent.method == "GET":
            return Answer(self._resources.get(call))
        change = patch_function(call.kind, sent) if sent.method == "PATCH" else None
        document = None if change else _document(sent)
        take = _take_ephemeral if call.subresource == "ephemeralcontainers" else _take_resources

        def changed(pod: Object, _txn: Transaction) -> Object:
            wanted = intake(call, change(copy.deepcopy(pod)) if change else document)
            meta = wanted["metadata"]
            if meta.get("name") not in (None, "", call.name):
                raise bad_request("the name of the object does not match the name on the URL")
            check_preconditions(call.kind, meta, pod["metadata"])
            new = copy.deepcopy(pod)
            errors = take(new["spec"], wanted.get("spec") or {}, pod["spec"])
            rules = rules_for("pods")
            rules.default(new)
            errors += rules.check(new)
            if qos_class(new["spec"]) != qos_class(pod["spec"]):
                errors.append(forbidden_field("spec", "Pod QOS Class may not change as a result of resizing"))
            if errors:
                raise invalid("Pod", "", call.name, errors)
            if new["spec"] != pod["spec"]:
                new["metadata"]["generation"] = int(pod["metadata"].get("generation", 0)) + 1
            return new

        return Answer(await self._write(call, changed))

    async def _finalize(self, call: Call, body: Any) -> Answer:
        """Set a namespace's finalizers; without any, one that is going is gone."""
        obj = await apart(call.size_bytes, intake, call, body)
        finalizers = (obj.get("spec") or {}).get("finalizers") or []

        def work(txn: Transaction) -> bytes:
            record = txn.get("namespaces", "", call.name)
            if record is None:
                raise not_found("namespaces", "", call.name)
            namespace = decode(record.body)
            namespace["spec"] = {"finalizers": finalizers} if finalizers else {}
            meta = namespace["metadata"]
            if call.options.is_dry_run:
                return encode(namespace)
            if not finalizers and meta.get("deletionTimestamp") and not meta.get("finalizers"):
                return txn.delete("namespaces", "", call.name, namespace).body
            return txn.put("namespaces", "", call.name, namespace).body

        return Answer(await self._resources.store.write(work))

    async def _scale(self, call: Call, sent: Sent) -> Answer:
        record = self._resources.store.get(call.kind.stored_as, call.namespace, call.name)
        if record is None:
            raise not_found(call.kind.plural, call.kind.group, call.name)
        scale = scale_of(call.kind, decode(record.body))
        if sent.method == "GET":
            return Answer(encode(scale))
        if sent.method == "PATCH":
            sent_scale: Any = await apart(PATCHED_BYTES, patch_function(call.kind, sent), scale)
        elif sent.method == "PUT":
            sent_scale = _document(sent)
        else:
            raise no_such_path()
        spec = sent_scale.get("spec") or {} if isinstance(sent_scale, dict) else None
        replicas = spec.get("replicas", 0) if isinstance(spec, dict) else None
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            raise bad_request("spec.replicas: Invalid value: must be greater than or equal to 0")
        path = _path(call.kind, "specReplicasPath", "spec.replicas")

        meta = sent_scale.get("metadata")

        def scaled(obj: Object, _txn: Transaction) -> Object:
            check_preconditions(call.kind, meta if isinstance(meta, dict) else {}, obj["metadata"])
            node = obj
            for step in path[:-1]:
                node = node.setdefault(step, {})
                if not isinstance(node, dict):
                    raise bad_request(f"the object has no field {'.'.join(path)}")
            node[path[-1]] = replicas
            return obj

        body = await self._resources.change(replace(call, subresource=""), scaled)
        return Answer(encode(scale_of(call.kind, decode(body))))


def _take_resources(spec: Object, wanted: Object, _old: Object) -> list[FieldError]:
    """Take over the resources of containers that exist; nothing else may change by resizing."""
    errors: list[FieldError] = []
    for part in ("containers", "initContainers"):
        sent = {container.get("name"): container for container in wanted.get(part) or []}
        for at, container in enumerate(spec.get(part) or []):
            resources = (sent.get(container["name"]) or {}).get("resources")
            if resources is None:
                continue
            for amounts in ("limits", "requests"):
                changed = _changed(resources.get(amounts) or {}, container["resources"].get(amounts) or {})
                if changed - {"cpu", "memory"}:
                    where = f"spec.{part}[{at}].resources.{amounts}"
                    errors.append(forbidden_field(where, "only cpu and memory resources are mutable"))
            container["resources"] = resources
    return errors


def _changed(new: Object, old: Object) -> set[str]:
    return {key for key in new.keys() | old.keys() if new.get(key) != old.get(key)}


def _take_ephemeral(spec: Object, wanted: Object, old: Object) -> list[FieldError]:
    """Take over the ephemeral containers that were added; those that are there may not change or go."""
    where = "spec.ephemeralContainers"
    had, has = old.get("ephemeralContainers") or [], wanted.get("ephemeralContainers") or []
    for container in has:
        default_container(container)
    by_name = {container.get("name"): container for container in has}
    errors: list[FieldError] = []
    for container in had:
        if by_name.get(container["name"]) != container:
            errors.append(forbidden_field(where, "existing ephemeral containers may not be changed or removed"))
            break
    mains = {container["name"] for container in spec.get("containers") or []}
    for at, container in enumerate(has):
        target = container.get("targetContainerName")
        if target and target not in mains:
            errors.append(FieldError("FieldValueNotFound", f"{where}[{at}].targetContainerName", "Not found"))
        errors += [
            forbidden_field(f"{where}[{at}].{field}", "cannot be set for an Ephemeral Container")
            for field in _NOT_EPHEMERAL
            if container.get(field)
        ]
    if has:
        spec["ephemeralContainers"] = has
    return errors


_NOT_EPHEMERAL = ("ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "resources", "resizePolicy")


def scale_of(kind: Kind, obj: Object) -> Object:
    """The Scale of an object."""
    meta = {
        key: obj["metadata"].get(key) for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    }
    selector = _at(obj, _path(kind, "labelSelectorPath", "spec.selector"))
    if isinstance(selector, dict):
        labels = selector.get("matchLabels") if "matchLabels" in selector else selector
        selector = ",".join(f"{key}={value}" for key, value in sorted((labels or {}).items()))
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: value for key, value in meta.items() if value},
        "spec": {"replicas": _at(obj, _path(kind, "specReplicasPath", "spec.replicas")) or 0},
        "status": {
            "replicas": _at(obj, _path(kind, "statusReplicasPath", "status.replicas")) or 0,
            **({"selector": selector} if selector else {}),
        },
    }


def _path(kind: Kind, name: str, default: str) -> list[str]:
    text = kind.custom.scale.get(name, "") if kind.custom is not None else default
    return [step for step in str(text).split(".") if step]


def _at(obj: Any, path: list[str]) -> Any:
    for step in path:
        obj = obj.get(step) if isinstance(obj, dict) else None
    return obj if path else None


def _document(sent: Sent) -> Any:
    if sent.method not in ("POST", "PUT"):
        raise method_not_allowed()
    return sent.document()
