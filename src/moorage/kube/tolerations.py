"""Whether a toleration matches a taint: the one rule of scheduling and eviction.

Owns: `tolerates`.
"""

from collections.abc import Iterable

from moorage.kube.objects.core import Taint
from moorage.kube.objects.pods import Toleration


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Return whether the toleration matches the taint. An empty effect or key matches all of them."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    return toleration.operator in ("", "Equal") and bool(toleration.key) and toleration.value == taint.value


def is_tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    """Return whether any of the tolerations matches the taint."""
    return any(tolerates(toleration, taint) for toleration in tolerations)
