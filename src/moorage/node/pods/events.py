"""Events about one pod on this node, each recorded once.

Owns: what was recorded already.
Start reading at: `PodEvents`.
"""

from collections.abc import Mapping

import msgspec

from moorage.kube.objects.meta import ObjectReference, reference_to
from moorage.kube.objects.pods import Pod
from moorage.node.layout import PodUid
from moorage.node.pods.lifecycle import CRASH_LOOP, ContainerAttempt, PodDecision, foreign_images
from moorage.node.pods.tools import Tools
from moorage.node.pods.unsupported import unsupported
from moorage.node.safe_names import bad_names

_MOUNT_PATIENCE_S = 123.0
_REFUSAL_PATIENCE_S = 2.0  # a claim and its volume may be heard of a little later than the pod


class PodEvents:
    """Records what is wrong with one pod."""

    def __init__(self, tools: Tools, uid: PodUid, now: float) -> None:
        self._tools = tools
        self._uid = uid
        self._mount_warned_at = now
        self._refusals_told: frozenset[str] = frozenset()
        self._told: set[str] = set()
        self._backed_off: dict[str, int] = {}  # the attempt after which a back-off was last recorded

    def foreign_images(self, pod: Pod) -> None:
        for name, text in foreign_images(pod).items():
            self._tools.recorder.warning(part_of(pod, name), "Failed", f"Failed to pull image: {text}")

    def refuses_names(self, pod: Pod) -> bool:
        """Whether the pod has names that must not become paths. Nothing of it is started, whatever ran before."""
        found = bad_names(pod)
        for text in found:
            if text not in self._told:
                self._told.add(text)
                self._tools.recorder.warning(pod, "InvalidName", f"{text}; nothing of this pod is started")
        return bool(found)

    def unsupported(self, pod: Pod) -> None:
        for text in unsupported(pod):
            if text not in self._told:
                self._told.add(text)
                self._tools.recorder.warning(pod, "Unsupported", text)

    def back_off(self, pod: Pod, decision: PodDecision, attempts: Mapping[str, ContainerAttempt]) -> None:
        for name, (reason, _) in decision.waiting.items():
            if reason == CRASH_LOOP and self._backed_off.get(name) != attempts[name].number:
                self._backed_off[name] = attempts[name].number
                text = f"Back-off restarting failed container {name} in pod {pod.name}_{pod.namespace}({pod.uid})"
                self._tools.recorder.warning(part_of(pod, name), "BackOff", text)

    def unmounted(self, pod: Pod, now: float) -> float:
        """Warn of volumes that are not mounted in time. Returns after how many seconds to call again."""
        refusals = self._tools.volumes.refusals(self._uid)
        is_news = not refusals <= self._refusals_told
        left = self._mount_warned_at + (_REFUSAL_PATIENCE_S if is_news else _MOUNT_PATIENCE_S) - now
        if left <= 0:
            names = ", ".join(self._tools.volumes.unmounted(pod))
            text = f"Unable to attach or mount volumes: unmounted volumes=[{names}]"
            if not refusals:
                text += ": timed out waiting for the condition"
            self._tools.recorder.warning(pod, "FailedMount", text)
            self._mount_warned_at, self._refusals_told = now, refusals
            left = _MOUNT_PATIENCE_S
        return left


def part_of(pod: Pod, name: str) -> ObjectReference:
    """One container of a pod, as the subject of an event."""
    kind = "initContainers" if any(one.name == name for one in pod.spec.init_containers) else "containers"
    return msgspec.structs.replace(reference_to(pod), field_path=f"spec.{kind}{{{name}}}")
