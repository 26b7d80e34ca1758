"""What an operator tells the plugin, checked once when it starts.

Owns: the settings' names, defaults and limits.
May not touch: pools, sockets, the environment.
Start reading at: `PluginSettings`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moorage.errors import UsageError
from moorage.plugin.parameters import INLINE_KEYS
from moorage.storage.model import TRASH_RETENTION_S

DRIVER_NAME = "csi.moorage.dev"
TOPOLOGY_KEY = "topology.moorage.dev/node"
SCOPES = ("node", "shared")
SERVICES = ("controller", "node")
DEFAULT_POOL = "default"

_DRIVER_NAME = re.compile(r"[A-Za-z0-9]([-.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_POOL_NAME = re.compile(r"[A-Za-z0-9]([-_A-Za-z0-9]{0,30}[A-Za-z0-9])?")  # page tokens hold it
CSI_VERSIONS = ("1.12", "1.13")


@dataclass(frozen=True)
class PluginSettings:
    """One plugin process. `checked` raises what is wrong."""

    endpoint: str
    node_id: str
    pools: Mapping[str, Path]
    scope: str = "node"
    services: frozenset[str] = frozenset(SERVICES)
    driver_name: str = DRIVER_NAME
    reserve_fraction: float = 0.05
    overcommit: float = 1.0
    trash_retention_s: float = TRASH_RETENTION_S
    max_volumes_per_node: int = 0
    largest_freeze_s: float = 10.0
    stop_grace_s: float = 60.0
    http_endpoint: str = ""
    csi_version: str = "1.12"
    kubelet_dir: str = ""
    inline_attributes: frozenset[str] = frozenset({"size", "fsType"})
    inline_max_bytes: int = 10 << 30

    @property
    def is_shared(self) -> bool:
        return self.scope == "shared"

    @property
    def shows_alpha(self) -> bool:
        """Whether v1.13's alpha capabilities are announced; their methods answer either way."""
        return self.csi_version == "1.13"

    @property
    def serves_controller(self) -> bool:
        return "controller" in self.services

    @property
    def serves_node(self) -> bool:
        return "node" in self.services

    def as_json(self) -> str:
        return msgspec.json.encode(self, enc_hook=str).decode()

    @staticmethod
    def from_json(text: str) -> "PluginSettings":
        return msgspec.json.decode(text, type=PluginSettings, dec_hook=lambda kind, value: kind(value))

    def checked(self) -> "PluginSettings":
        """These settings, or UsageError naming the flag that is wrong."""
        for flag, is_wrong, why in self._rules():
            if is_wrong:
                raise UsageError(f"{flag}: {why}")
        return self

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [
            ("--driver-name", not _DRIVER_NAME.fullmatch(self.driver_name), "up to 63 of letters, digits, - and ."),
            ("--node-id", not self.node_id, "is needed"),
            # The id is the value of the topology label as well.
            ("--node-id", not _LABEL.fullmatch(self.node_id), "up to 63 of letters, digits, -, _ and ."),
            ("--pool", not self.pools, "at least one is needed, as NAME=DIR or DIR"),
            ("--scope", self.scope not in SCOPES, "node or shared"),
            ("--services", not self.services, "controller, node, or both"),
            ("--services", not self.services <= set(SERVICES), "controller, node, or both"),
            ("--reserve", not 0 <= self.reserve_fraction < 1, "between 0 and 100 %"),
            ("--overcommit", not self.overcommit > 0, "more than 0"),
            ("--trash-retention", self.trash_retention_s < 0, "0 or more"),
            ("--csi-version", self.csi_version not in CSI_VERSIONS, "1.12 or 1.13"),
            ("--kubelet-dir", self.kubelet_dir[:1] not in ("", "/"), "an absolute path"),
            (
                "--inline-attributes",
                not self.inline_attributes <= INLINE_KEYS,
                f"known are {', '.join(sorted(INLINE_KEYS))}",
            ),
            ("--inline-max-size", self.inline_max_bytes < 0, "0 (none are made) or more"),
            ("--max-volumes-per-node", self.max_volumes_per_node < 0, "0 (no limit) or more"),
        ]


def pools_from(options: list[str]) -> dict[str, Path]:
    """`NAME=DIR` or `DIR` (then called `default`), in the order given."""
    pools: dict[str, Path] = {}
    for option in options:
        name, equals, directory = option.partition("=")
        if not equals or "/" in name:
            name, directory = DEFAULT_POOL, option
        if not _POOL_NAME.fullmatch(name):
            raise UsageError(f"--pool {option}: a pool's name has up to 32 of letters, digits, - and _")
        if not directory.startswith("/"):
            raise UsageError(f"--pool {option}: the directory must be an absolute path")
        if name in pools:
            raise UsageError(f"--pool {option}: there is another pool called {name}")
        pools[name] = Path(directory)
    return pools


_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def duration_s_from(text: str) -> float:
    """`90`, `90s`, `15m`, `12h`, `7d` or `1d12h`, in seconds; ValueError for anything else."""
    if re.fullmatch(r"\d{1,15}", text):
        return float(text)
    found = _DURATION.fullmatch(text)
    if not text or not found:
        raise ValueError(f"{text!r} is not a duration such as 90s, 15m, 12h or 7d")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def fraction_from(text: str) -> float:
    """`5%` or `0.05`; ValueError for anything else."""
    number = text.removesuffix("%")
    if not re.fullmatch(r"\d+(\.\d+)?", number):
        raise ValueError(f"{text!r} is not a share such as 5% or 0.05")
    return float(number) / 100 if text.endswith("%") else float(number)
