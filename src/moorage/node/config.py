"""The settings of one node agent.

Owns: `AgentConfig`, and what happens to pods when the agent stops.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from moorage.kube.api.config import ApiConfig
from moorage.node.plugins.registry import CALL_TIMEOUT_S

KEEP, DRAIN, REMOVE = "keep", "drain", "remove"


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Everything that distinguishes one agent from another on the same machine."""

    node_name: str
    root: Path
    api: ApiConfig
    address: str = "127.0.0.1"
    port: int = 0
    client_ca: Path | None = None
    labels: dict[str, str] = field(default_factory=dict)
    hide: tuple[str, ...] = ()
    on_stop: str = KEEP
    drain_timeout_s: float = 60.0
    sync_s: float = 60.0
    call_timeout_s: float = CALL_TIMEOUT_S
    has_se_linux: bool = field(default_factory=lambda: os.path.exists("/sys/fs/selinux/enforce"))
