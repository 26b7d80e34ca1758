"""Every flag of the sidecars: official names, official defaults unless the help says otherwise.

Owns: one frozen dataclass, and Go's way of writing durations, maps and booleans. The command line is made from it.
May not touch: the environment; `run.py` fills in what comes from there.
Start reading at: `SidecarSettings`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage.errors import UsageError

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+|0")
_DEFAULT_WORKERS = {"provisioner": 100, "attacher": 10, "resizer": 10, "snapshotter": 10, "health": 10}
_DEFAULT_TIMEOUT_S = {
    "provisioner": 10.0,
    "capacity": 10.0,
    "attacher": 15.0,
    "resizer": 10.0,
    "snapshotter": 60.0,
    "health": 15.0,
    "registrar": 1.0,
}


def duration_s(text: str) -> float:
    """`1m30s` in seconds, as Go's flags take it."""
    if not _DURATION.fullmatch(text):
        raise UsageError(f"{text!r} is not a duration; write it as 10s, 1m30s or 500ms")
    return sum(float(n) * _UNITS[u] for n, u in re.findall(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", text))


def duration_text(seconds: float) -> str:
    """Seconds as Go's flags are written, and as a user reads them: `5m`, `1.5s`."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m" if minutes and not rest else f"{seconds:g}s"


def pairs_from(text: str, between: str) -> dict[str, str]:
    """`a:b,c:d` (or `a=b,c=d`) as a dictionary."""
    pairs = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, found, value = part.partition(between)
        if not found:
            raise UsageError(f"{part!r}: want key{between}value")
        pairs[key.strip()] = value.strip()
    return pairs


def _flag(default: Any, help: str, *, kind: str = "", name: str = "", also: str = "") -> Any:
    return field(default=default, metadata={"help": help, "kind": kind, "name": name, "also": also})


def _duration(default: float | None, help: str, **more: str) -> Any:
    return _flag(default, help, kind="duration", **more)


@dataclass(frozen=True)
class SidecarSettings:
    """The flags of all roles; a flag whose default differs between roles is None until it is given."""

    csi_address: str = _flag("/run/csi/socket", "The driver's socket, as a path or unix:// address.")
    kubeconfig: str = _flag("", "A kubeconfig; otherwise KUBECONFIG, or the account of the pod.")
    kube_api_qps: float = _flag(0.0, "Requests per second to the API server; 0 is no limit (official: 5).")
    kube_api_burst: int = _flag(0, "Requests at once when --kube-api-qps is set (official: 10).")
    worker_threads: int | None = _flag(
        None, "Objects worked on at once (provisioner 100, others 10).", name="worker-threads", also="workers"
    )
    timeout_s: float | None = _duration(
        None, "Limit of each CSI call (provisioner, resizer 10s, attacher, health 15s, snapshotter 1m, registrar 1s)."
    )
    retry_interval_start_s: float = _duration(1.0, "First wait after a failure; doubles with each further one.")
    retry_interval_max_s: float = _duration(300.0, "Longest wait after a failure.")
    resync_s: float = _duration(600.0, "Look at every object again after this time.", also="resync-period")
    leader_election: bool = _flag(False, "Work only while holding the role's lease.")
    leader_election_namespace: str = _flag("", "Where the leases are (POD_NAMESPACE, the account's, default).")
    leader_election_lease_duration_s: float = _duration(15.0, "How long a lease is good for without renewal.")
    leader_election_renew_deadline_s: float = _duration(10.0, "How long a leader tries to renew before it steps down.")
    leader_election_retry_period_s: float = _duration(5.0, "How long to wait between attempts.")
    leader_election_labels: str = _flag("", "Labels for the leases, as k:v,k2:v2.")
    http_endpoint: str = _flag("", "Address for /metrics and /healthz, as :8080 or 127.0.0.1:8080.")
    metrics_address: str = _flag("", "Deprecated: --http-endpoint.")
    metrics_path: str = _flag("/metrics", "Path of the metrics.")
    feature_gates: str = _flag("", "Gates as Name=true,Other=false.")
    extra_create_metadata: bool = _flag(False, "Tell the driver the names of claim and volume, or of snapshot.")
    default_fstype: str = _flag("", "Filesystem when neither class nor volume names one.")
    node_deployment: bool = _flag(False, "One process per node, each for its own volumes; NODE_NAME names the node.")
    node_deployment_immediate_binding: bool = _flag(True, "Also provision Immediate claims, one node each.")
    node_deployment_base_delay_s: float = _duration(
        1.0, "How much longer each next node waits before it takes an Immediate claim (official: 20s)."
    )
    node_deployment_max_delay_s: float = _duration(10.0, "Longest such wait (official: 60s).")
    intent_journal: bool = _flag(
        True, "Note each volume being made in a Lease, so that a crash leaks none (not official)."
    )
    volume_name_prefix: str = _flag("pvc", "Volumes are named PREFIX-UID.")
    volume_name_uuid_length: int = _flag(-1, "Cut the UID in names to this many characters; -1 is all.")
    strict_topology: bool = _flag(False, "Late binding: the selected node's topology only.")
    immediate_topology: bool = _flag(True, "Immediate binding: send all of the cluster's topology.")
    controller_publish_readonly: bool = _flag(False, "Mark volumes of read-only claims as readOnly.")
    prevent_volume_mode_conversion: bool = _flag(True, "Refuse to restore a snapshot in another volume mode.")
    cloning_protection_threads: int = _flag(1, "Source claims of clones looked at at once.")
    snapshot_orphan_sweep_interval_s: float = _duration(300.0, "How often leftover source finalizers are removed.")
    enable_capacity: bool = _flag(False, "Also run the capacity role beside the provisioner.")
    capacity_threads: int = _flag(1, "Capacities asked for at once.")
    capacity_poll_interval_s: float = _duration(60.0, "How often capacity is asked for without a change.")
    capacity_ownerref_level: int = _flag(1, "Owner of the capacity objects: 0 the pod, 1 its owner, -1 none.")
    capacity_for_immediate_binding: bool = _flag(False, "Publish capacity for Immediate classes too.")
    kube_api_capacity_qps: float = _flag(1.0, "Requests per second for capacity objects.")
    kube_api_capacity_burst: int = _flag(5, "Requests at once for capacity objects.")
    reconcile_sync_s: float = _duration(60.0, "How often attachments are compared with ListVolumes.")
    max_entries: int = _flag(0, "Page size of ListVolumes; 0 leaves it to the driver.")
    handle_volume_inuse_error: bool = _flag(True, "Wait for pods to end when the driver expands offline only.")
    extra_modify_metadata: bool = _flag(False, "Tell ControllerModifyVolume the names of claim and volume.")
    snapshot_name_prefix: str = _flag("snapshot", "Snapshots are named PREFIX-UID.")
    snapshot_name_uuid_length: int = _flag(-1, "Cut the UID in snapshot names; -1 is all.")
    groupsnapshot_name_prefix: str = _flag("groupsnapshot", "Group snapshots are named PREFIX-UID.")
    groupsnapshot_name_uuid_length: int = _flag(-1, "Cut the UID in group snapshot names; -1 is all.")
    kubelet_registration_path: str = _flag("", "registrar: the driver's socket as the kubelet sees it.")
    mode: str = _flag("", "registrar: kubelet-registration-probe ends at once and well; anything else is the same.")
    plugin_registration_path: str = _flag("/registration", "registrar: folder for the registration socket.")
    health_port: int = _flag(
        0, "liveness, registrar: TCP port for /healthz (9808 when liveness is named without any endpoint)."
    )
    probe_timeout_s: float = _duration(3.0, "liveness: limit of connect and Probe.")
    monitor_interval_s: float = _duration(60.0, "health: how often one volume is asked about.")
    list_volumes_interval_s: float = _duration(300.0, "health: how often all volumes are listed.")
    enable_node_watcher: bool = _flag(False, "health: tell claims when the node of their pods fails.")
    version: bool = _flag(False, "Print the version and end.")

    take_over_node: str = _flag(
        "", "Instead of running: release what waits for this node, which is gone for good. Its data counts as lost."
    )
    driver_name: str = _flag("", "With --take-over-node: the driver, when its socket is not on this machine.")
    yes: bool = _flag(False, "With --take-over-node: do it; otherwise only say what would be done.")

    def workers_for(self, role: str) -> int:
        return self.worker_threads if self.worker_threads is not None else _DEFAULT_WORKERS.get(role, 10)

    def timeout_for(self, role: str) -> float:
        return self.timeout_s if self.timeout_s is not None else _DEFAULT_TIMEOUT_S.get(role, 15.0)

    def gate(self, name: str, default: bool) -> bool:
        """A feature gate as given, or its default."""
        value = pairs_from(self.feature_gates, "=").get(name)
        return default if value is None else value.lower() in ("true", "1", "t")

    @property
    def retry_words(self) -> str:
        """For the user: what follows on a failure, and when. The same each time, so that equal events are counted."""
        start, longest = duration_text(self.retry_interval_start_s), duration_text(self.retry_interval_max_s)
        return f"retried with growing pauses of {start} to {longest}"

    @property
    def endpoint(self) -> str:
        return self.http_endpoint or self.metrics_address

    def check(self) -> None:
        """UsageError for combinations that cannot work."""
        if self.http_endpoint and self.metrics_address:
            raise UsageError("--http-endpoint and --metrics-address exclude each other; keep the first")
        if self.node_deployment and self.leader_election:
            raise UsageError("--node-deployment and --leader-election exclude each other: every node is its own leader")
        for gate, value in pairs_from(self.feature_gates, "=").items():
            if value.lower() not in ("true", "false", "1", "0", "t", "f"):
                raise UsageError(f"--feature-gates: {gate} must be true or false, not {value!r}")
        pairs_from(self.leader_election_labels, ":")


@dataclass(frozen=True)
class SidecarEnvironment:
    """What a process learns from where it runs: its node, pod, namespace and host."""

    node_name: str = ""
    namespace: str = "default"
    pod_name: str = ""
    capacity_namespace: str = ""
    hostname: str = ""
    identity: str = ""  # who holds a lease; the host alone would make two processes of one machine the same holder

    @classmethod
    def of(
        cls, environment: Mapping[str, str], hostname: str, pid: int, account_namespace: str
    ) -> "SidecarEnvironment":
        return cls(
            node_name=environment.get("NODE_NAME", ""),
            namespace=environment.get("POD_NAMESPACE", "") or account_namespace or "default",
            pod_name=environment.get("POD_NAME", ""),
            capacity_namespace=environment.get("NAMESPACE", "") or environment.get("POD_NAMESPACE", ""),
            hostname=hostname,
            identity=f"{hostname}-{pid}",
        )
