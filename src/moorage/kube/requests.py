"""What pods request of a node: processors, memory and whatever else has an amount.

Owns: which containers of a pod count together.
Start reading at: `requests_of`.
"""

from collections.abc import Mapping
from decimal import Decimal

from moorage.kube.objects.pods import Container, Pod
from moorage.kube.quantity import BadQuantity, Quantity

Amounts = dict[str, Decimal]

_OF_PODS = ("cpu", "memory")


def requests_of(pod: Pod) -> Amounts:
    """What a pod asks for: what it says as a whole, or its containers together, or its greediest init container if that
    is more."""
    total: Amounts = {}
    for container in pod.spec.containers:
        _add(total, requests_of_container(container))
    running: Amounts = {}  # init containers that keep running beside the others
    greediest: Amounts = {}
    for container in pod.spec.init_containers:
        asked = requests_of_container(container)
        if container.restart_policy == "Always":
            _add(running, asked)
            _raise_to(greediest, running)
        else:
            together = dict(running)
            _add(together, asked)
            _raise_to(greediest, together)
    _add(total, running)
    _raise_to(total, greediest)
    total = {**_of_pod(pod.spec.resources.limits), **total, **_of_pod(pod.spec.resources.requests)}
    _add(total, amounts_of(pod.spec.overhead))
    return total


def requests_of_container(container: Container) -> Amounts:
    """A limit alone is also the request."""
    return amounts_of({**container.resources.limits, **container.resources.requests})


def amounts_of(quantities: Mapping[str, str | int | float]) -> Amounts:
    """Those that can be read."""
    amounts: Amounts = {}
    for name, text in quantities.items():
        try:
            amounts[name] = Quantity.parse(text).amount
        except BadQuantity:
            continue  # unreadable; the server should have refused it
    return amounts


def _of_pod(quantities: Mapping[str, str | int | float]) -> Amounts:
    """Those that a pod can have as a whole."""
    amounts = amounts_of(quantities)
    return {name: amount for name, amount in amounts.items() if name in _OF_PODS or name.startswith("hugepages-")}


def _add(total: Amounts, more: Amounts) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, Decimal(0)) + amount


def _raise_to(total: Amounts, least: Amounts) -> None:
    for name, amount in least.items():
        total[name] = max(total.get(name, Decimal(0)), amount)
