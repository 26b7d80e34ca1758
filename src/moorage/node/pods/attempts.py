"""What is known of the attempts at a pod's containers, as values to decide and report with.

Owns: reading state, specification and control group of an attempt, and writing down what only the group tells, which
does not outlive the machine's run. Decides nothing.
Start reading at: `attempts_of`.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from moorage.host.boot import boot_id
from moorage.log import get_logger
from moorage.node.pods.lifecycle import ContainerAttempt
from moorage.node.runtime import DRAINED, RunningContainer
from moorage.node.runtime.cgroups import ContainerCgroups
from moorage.node.runtime.container_state import read_spec, write_state

log = get_logger(__name__)


def attempts_of(
    containers: Mapping[str, Sequence[RunningContainer]], cgroups: ContainerCgroups
) -> dict[str, ContainerAttempt]:
    """The newest attempt at each container, with the one before."""
    found = {}
    for name, every in containers.items():
        previous: ContainerAttempt | None = None
        for container, following in pairwise((*every[-2:], None)):
            if container is not None:
                previous = _attempt(container, following, previous, cgroups)
        if previous is not None:
            found[name] = previous
    return found


def _attempt(
    container: RunningContainer,
    following: RunningContainer | None,
    previous: ContainerAttempt | None,
    cgroups: ContainerCgroups,
) -> ContainerAttempt:
    state: dict[str, Any] = container.state
    spec = {} if container.is_running else read_spec(container.directory)
    reason = str(state.get("reason") or "")
    if not reason and container.is_ended and _was_out_of_memory(container, spec, following, cgroups):
        reason = "OOMKilled"
        _record(container, reason)
    return ContainerAttempt(
        number=container.attempt,
        is_running=container.is_running,
        started=float(state.get("started") or 0.0),
        finished=float(state.get("finished") or state.get("started") or 0.0),
        exit_code=None if container.is_running else container.exit_code,
        signal=int(state.get("signal") or 0),
        reason=reason,
        message=str(state.get("message") or ""),
        streak=int(spec.get("streak") or 0),
        is_drained=not container.is_running and (container.directory / DRAINED).exists(),
        is_of_this_boot=spec.get("boot") in (None, boot_id()),
        id=container.id,
        previous=previous,
    )


def _was_out_of_memory(
    container: RunningContainer, spec: Mapping[str, Any], following: RunningContainer | None, cgroups: ContainerCgroups
) -> bool:
    """Whether the kernel has killed something in the container's group, which all attempts share, from its start to
    the next one's."""
    if following is None:
        kills = cgroups.oom_kills(container.uid, container.name)
    else:
        kills = int(read_spec(following.directory).get("oom_kills") or 0)
    return kills > int(spec.get("oom_kills") or 0)


def _record(container: RunningContainer, reason: str) -> None:
    container.state["reason"] = reason
    try:
        write_state(container.directory, container.state)
    except OSError as error:  # full or read-only: known for as long as this agent or the group is there
        log.warning("why a container was killed is not recorded", container=container.id, reason=str(error))
