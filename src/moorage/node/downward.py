"""A pod's own fields as text, for environment variables and downward files.

Owns: fieldRef and resourceFieldRef. Pure, but for the size of the machine.
"""

import os
from collections.abc import Mapping
from typing import Any

from moorage.errors import MoorageError
from moorage.kube.objects.pods import Container, Pod
from moorage.kube.quantity import Quantity


class UnknownField(MoorageError):
    """A field that a pod does not have or that cannot be shown."""

    code = "INVALID_ARGUMENT"
    retryable = False


def field_of(pod: Pod, path: str, host_ip: str = "127.0.0.1") -> str:
    """The value of a fieldRef; labels and annotations come one to a line, quoted."""
    for prefix, held in (("metadata.labels", pod.labels), ("metadata.annotations", pod.annotations)):
        if path == prefix:
            return "\n".join(f'{key}="{_quoted(value)}"' for key, value in sorted(held.items()))
        if path.startswith(f"{prefix}['") and path.endswith("']"):
            return held.get(path[len(prefix) + 2 : -2], "")
    values = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "metadata.uid": pod.uid,
        "spec.nodeName": pod.spec.node_name,
        "spec.serviceAccountName": pod.spec.service_account_name or "default",
        "status.hostIP": host_ip,
        "status.hostIPs": host_ip,
        "status.podIP": host_ip,
        "status.podIPs": host_ip,
    }
    if path not in values:
        raise UnknownField(f"pod {pod.key}: field {path!r} cannot be shown to containers")
    return values[path]


def resource_of(pod: Pod, reference: Mapping[str, Any], container: Container | None = None) -> str:
    """The value of a resourceFieldRef such as limits.memory, divided as asked and rounded up."""
    named = reference.get("containerName")
    every = (*pod.spec.containers, *pod.spec.init_containers)
    chosen = next((one for one in every if one.name == named), container)
    kind, _, resource = str(reference.get("resource", "")).partition(".")
    if chosen is None or kind not in ("limits", "requests"):
        raise UnknownField(f"pod {pod.key}: resource {reference.get('resource')!r} cannot be shown to containers")
    held = chosen.resources.limits if kind == "limits" else chosen.resources.requests
    amount = Quantity.parse(held.get(resource, "0"))
    if kind == "limits" and amount.amount == 0:
        amount = Quantity.parse(_whole_machine(resource))
    divisor = Quantity.parse(reference.get("divisor") or "1")
    if divisor.amount == 0:
        divisor = Quantity.parse("1")
    return str(Quantity(amount.amount / divisor.amount).value)


def _whole_machine(resource: str) -> str:
    """A container without a limit may use all that the node has."""
    if resource == "cpu":
        return str(os.cpu_count() or 1)
    if resource == "memory":
        return str(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return "0"


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
