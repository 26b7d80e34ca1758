"""The account that a pod runs under: its name, its image secrets, and the volume with its token.

Owns: what Kubernetes' ServiceAccount admission does to a new pod.
May not touch: tokens themselves; the node asks for one when it mounts the volume.
Start reading at: `admit_account`.
"""

from moorage.apiserver.errors import forbidden
from moorage.apiserver.kinds.metadata import generated_name
from moorage.apiserver.kinds.registry import Object
from moorage.apiserver.store.store import Transaction, decode
from moorage.kube.names import MIRROR_POD

MOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_VOLUME_PREFIX = "kube-api-access-"
_TOKEN_SECONDS = 3607  # an hour and a bit, so that a kubelet can tell this volume from one that a user wrote


def admit_account(txn: Transaction, pod: Object) -> None:
    """Give a new pod its account, and the files with which its processes find and trust the API server."""
    spec, meta = pod["spec"], pod["metadata"]
    if MIRROR_POD in (meta.get("annotations") or {}):
        if spec.get("serviceAccountName"):
            raise forbidden("pods", "", meta.get("name", ""), "a mirror pod may not reference service accounts")
        return
    name = spec.get("serviceAccountName") or "default"
    spec["serviceAccountName"] = spec["serviceAccount"] = name
    account = _account(txn, meta["namespace"], name, meta.get("name", ""))
    if spec.get("automountServiceAccountToken", account.get("automountServiceAccountToken", True)):
        _mount_token(spec)
    if not spec.get("imagePullSecrets") and account.get("imagePullSecrets"):
        spec["imagePullSecrets"] = account["imagePullSecrets"]


def _account(txn: Transaction, namespace: str, name: str, pod: str) -> Object:
    record = txn.get("serviceaccounts", namespace, name)
    if record is not None:
        account: Object = decode(record.body)
        return account
    if name == "default":  # a new namespace gets it in a moment; a pod need not wait for that
        return {}
    why = f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'
    raise forbidden("pods", "", pod, why)


def _mount_token(spec: Object) -> None:
    """A volume with token, certificate and namespace, in every container that has nothing at that path."""
    names = [volume.get("name", "") for volume in spec.get("volumes") or []]
    known = next((name for name in names if name.startswith(_VOLUME_PREFIX)), "")
    name = known or generated_name(_VOLUME_PREFIX)
    is_used = False
    for part in ("initContainers", "containers"):
        for container in spec.get(part) or []:
            mounts = container.setdefault("volumeMounts", [])
            if not any(mount.get("mountPath") == MOUNT_PATH for mount in mounts):
                mounts.append({"name": name, "readOnly": True, "mountPath": MOUNT_PATH})
                is_used = True
    if is_used and not known:
        spec.setdefault("volumes", []).append({"name": name, "projected": _projection()})


def _projection() -> Object:
    here = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    return {
        "sources": [
            {"serviceAccountToken": {"expirationSeconds": _TOKEN_SECONDS, "path": "token"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": here}]}},
        ],
        "defaultMode": 420,
    }
