"""kubectl, whichever is on the PATH, does not notice that this is not Kubernetes."""

import json
import subprocess

CLASS = """
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: fast}
provisioner: csi.moorage.dev
allowVolumeExpansion: true
"""
CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, labels: {app: web}}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: fast
  resources: {requests: {storage: 1Gi}}
"""
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: vol}
spec:
  accessModes: [ReadWriteOnce]
  capacity: {storage: 1Gi}
  csi: {driver: csi.moorage.dev, volumeHandle: h}
"""


def test_apply_get_and_describe(kubectl):
    assert "created" in kubectl("apply", "-f", "-", stdin=CLASS + "---" + CLAIM)
    assert "unchanged" in kubectl("apply", "-f", "-", stdin=CLAIM)
    table = kubectl("get", "pvc")
    assert table.split()[:4] == ["NAME", "STATUS", "VOLUME", "CAPACITY"]
    assert "VOLUMEMODE" in kubectl("get", "pvc", "-o", "wide")
    assert json.loads(kubectl("get", "pvc", "data", "-o", "json"))["spec"]["volumeMode"] == "Filesystem"
    assert "storageClassName: fast" in kubectl("get", "pvc", "data", "-o", "yaml")
    assert kubectl("get", "pvc", "data", "-o", "jsonpath={.status.phase}") == "Pending"
    assert "fast" in kubectl("get", "pvc", "-o", "custom-columns=C:.spec.storageClassName")
    assert "kubernetes.io/pvc-protection" in kubectl("describe", "pvc", "data")
    assert "data" in kubectl("get", "pvc", "-l", "app=web", "-o", "name")
    assert kubectl("get", "pvc", "-l", "app=other", "-o", "name") == ""
    assert "data" in kubectl("get", "pvc", "--field-selector", "metadata.name=data", "-o", "name")


def test_changes_of_every_sort(kubectl):
    kubectl("create", "-f", "-", stdin=VOLUME)
    kubectl("label", "pv", "vol", "tier=gold")
    kubectl("annotate", "pv", "vol", "note=kept")
    kubectl("patch", "pv", "vol", "-p", '{"spec":{"mountOptions":["noatime"]}}')
    kubectl("patch", "pv", "vol", "--type", "merge", "-p", '{"spec":{"storageClassName":"fast"}}')
    kubectl("patch", "pv", "vol", "--type", "json", "-p", '[{"op":"remove","path":"/spec/mountOptions"}]')
    kubectl("edit", "pv", "vol", env={"EDITOR": "sed -i s/gold/silver/"})
    found = json.loads(kubectl("get", "pv", "vol", "-o", "json"))
    assert (found["metadata"]["labels"], found["metadata"]["annotations"]) == ({"tier": "silver"}, {"note": "kept"})
    assert found["spec"]["storageClassName"] == "fast"
    assert "mountOptions" not in found["spec"]
    found["spec"]["capacity"]["storage"] = "2Gi"
    kubectl("replace", "-f", "-", stdin=json.dumps(found))
    assert "2Gi" in kubectl("get", "pv", "vol")
    refusal = kubectl("patch", "pv", "vol", "-p", '{"spec":{"csi":{"volumeHandle":"x"}}}', fails=True)
    assert "immutable" in refusal
    kubectl("delete", "pv", "vol", "--wait=false")
    kubectl("patch", "pv", "vol", "--type", "merge", "-p", '{"metadata":{"finalizers":null}}')
    assert "NotFound" in kubectl("get", "pv", "vol", fails=True)


def test_server_side_apply_and_its_conflicts(kubectl):
    base = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: ssa}\ndata: {a: %s}\n"
    kubectl("apply", "--server-side", "-f", "-", stdin=base % "one")
    assert "conflict" in kubectl(
        "apply", "--server-side", "--field-manager=other", "-f", "-", stdin=base % "two", fails=True
    )
    kubectl("apply", "--server-side", "--field-manager=other", "--force-conflicts", "-f", "-", stdin=base % "two")
    assert kubectl("get", "cm", "ssa", "-o", "jsonpath={.data.a}") == "two"


def test_watch_and_wait(kubectl):
    kubectl("create", "configmap", "seen", "--from-literal=a=b")
    watching = subprocess.Popen(
        ["kubectl", "get", "cm", "seen", "-w", "-o", "name"], stdout=subprocess.PIPE, text=True, env=kubectl.environment
    )
    assert watching.stdout.readline().strip() == "configmap/seen"
    kubectl("label", "cm", "seen", "x=y")
    assert watching.stdout.readline().strip() == "configmap/seen"
    watching.terminate()
    watching.wait(30)
    watching.stdout.close()
    waiting = subprocess.Popen(["kubectl", "wait", "--for=delete", "cm/seen", "--timeout=60s"], env=kubectl.environment)
    kubectl("delete", "cm", "seen")
    assert waiting.wait(60) in (0, 1), "an old kubectl that comes too late finds nothing to wait for"
    kubectl("wait", "--for=condition=established", "crd/volumesnapshots.snapshot.storage.k8s.io", "--timeout=10s")


def test_schemas_and_discovery(kubectl):
    assert "accessModes" in kubectl("explain", "pvc.spec")
    assert "persistentVolumeClaimName" in kubectl("explain", "volumesnapshot.spec.source")
    resources = kubectl("api-resources")
    assert "volumeattachments" in resources
    assert "volumegroupsnapshots" in resources
    assert "storage.k8s.io/v1" in kubectl("api-versions")
    assert kubectl("auth", "can-i", "create", "pods").strip() == "yes"
    bad = kubectl("apply", "-f", "-", stdin=CLASS.replace("allowVolumeExpansion", "allowVolumeExplosion"), fails=True)
    assert "unknown field" in bad
    assert "Server Version" in kubectl("version")


def test_namespaces_and_pods(kubectl):
    kubectl("create", "namespace", "team")
    kubectl("run", "p", "--image=host", "-n", "team")
    assert "Pending" in kubectl("get", "pods", "-n", "team")
    assert "p" in kubectl("get", "pods", "-A")
    assert "host" in kubectl("describe", "pod", "p", "-n", "team")
    kubectl("get", "events", "-n", "team")
    kubectl("delete", "namespace", "team")
    assert "NotFound" in kubectl("get", "namespace", "team", fails=True)


def test_a_deployment_of_a_driver_can_be_applied(kubectl):
    manifest = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: driver}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: driver}
rules: [{apiGroups: [""], resources: [nodes], verbs: [get]}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: driver}
spec:
  selector: {matchLabels: {app: driver}}
  template:
    metadata: {labels: {app: driver}}
    spec:
      serviceAccountName: driver
      containers: [{name: plugin, image: "x:1", ports: [{containerPort: 80}]}]
"""
    kubectl("apply", "-f", "-", stdin=manifest)
    assert "unchanged" in kubectl("apply", "-f", "-", stdin=manifest)
    changed = kubectl("apply", "-f", "-", stdin=manifest.replace("x:1", "x:2"))
    assert "daemonset.apps/driver configured" in changed
    kubectl("delete", "-f", "-", stdin=manifest)
