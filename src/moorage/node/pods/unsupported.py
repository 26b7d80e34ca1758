"""What pods ask for and do not get here, in words: pure functions.

Owns: the list of it, which docs/explanation/containers.md repeats.
Start reading at: `unsupported`.
"""

from collections.abc import Mapping
from typing import Any

from moorage.kube.objects.pods import Pod, PodSecurityContext

NO_EPHEMERAL = "ephemeral containers are not run by this node agent: use kubectl exec"
_NO_PROFILES = "seccomp and AppArmor profiles are not applied by this node agent"


def unsupported(pod: Pod) -> list[str]:
    """What the pod asks for that this agent does not do, in words; it runs all the same."""
    found = []
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        probes = [
            name
            for name, probe in (
                ("livenessProbe", container.liveness_probe),
                ("readinessProbe", container.readiness_probe),
                ("startupProbe", container.startup_probe),
            )
            if probe
        ]
        if probes:
            found.append(f"container {container.name}: {', '.join(probes)} not run by this node agent")
        if container.stdin or container.tty:
            found.append(f"container {container.name}: stdin and tty are empty, this node agent serves no attach")
        if any(rule.get("action") != "Restart" for rule in container.restart_policy_rules):
            found.append(f"container {container.name}: of restartPolicyRules this node agent knows only Restart")
        if container.lifecycle:
            found.append(f"container {container.name}: lifecycle hooks are not run by this node agent")
        security = container.security_context or {}
        if _confines(security.get("seccompProfile")) or _confines(security.get("appArmorProfile")):
            found.append(f"container {container.name}: {_NO_PROFILES}")
    return found + _unsupported_of_pod(pod)


def _unsupported_of_pod(pod: Pod) -> list[str]:
    spec, security = pod.spec, pod.spec.security_context or PodSecurityContext()
    asked = {
        "hostUsers: false is not heeded by this node agent: root in the containers is root of the host": (
            spec.host_users is False
        ),
        f"runtimeClassName {spec.runtime_class_name!r} is not heeded: this node has no container runtime": bool(
            spec.runtime_class_name
        ),
        _NO_PROFILES: (_confines(security.seccomp_profile) or _confines(security.app_armor_profile)),
        "sysctls are not set by this node agent": bool(security.sysctls),
        "hostAliases are not written by this node agent: /etc/hosts is the host's": bool(spec.host_aliases),
        "dnsConfig is not written by this node agent: /etc/resolv.conf is the host's": bool(spec.dns_config),
        "shareProcessNamespace is not heeded by this node agent": bool(spec.share_process_namespace),
        NO_EPHEMERAL: bool(spec.ephemeral_containers),
    }
    return [text for text, is_asked in asked.items() if is_asked]


def _confines(profile: Mapping[str, Any] | None) -> bool:
    return bool(profile and profile.get("type") != "Unconfined")
