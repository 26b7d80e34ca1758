"""Everything that a volume can go through on a cluster, with kubectl, for either scope of the manifests."""

from real_stage import Stage


def claim(name: str, storage_class: str, size: str = "64Mi", **spec) -> dict:
    wanted = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": storage_class,
        "resources": {"requests": {"storage": size}},
        **spec,
    }
    metadata = {"name": name, "labels": {"app": "shop"} if name.startswith("group") else {}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": wanted}


def pod(name: str, claims: list[str], script: str) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "main",
                    "image": "host",
                    "command": ["sh", "-c", f"{script}\nexec sleep infinity"],
                    "volumeMounts": [{"name": c, "mountPath": f"/{c}"} for c in claims],
                }
            ],
            "volumes": [{"name": c, "persistentVolumeClaim": {"claimName": c}} for c in claims],
        },
    }


def storage_class(name: str, driver: str, binding: str, **parameters: str) -> dict:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": driver,
        "parameters": parameters,
        "volumeBindingMode": binding,
        "allowVolumeExpansion": True,
    }


class Life:
    """The steps, each of which checks what it promised. `image` and `directory` are classes of the driver."""

    def __init__(self, stage: Stage, driver: str, image: str, directory: str, snapshots: str) -> None:
        self.stage = stage
        self.driver = driver
        self.image = image
        self.directory = directory
        self.snapshots = snapshots

    def run(self) -> None:
        self.write()
        self.snapshot()
        self.copy()
        self.grow()
        self.modify()
        self.group()
        self.refuse()
        self.refuse_snapshot()
        self.remove()

    def write(self) -> None:
        stage = self.stage
        stage.apply(
            claim("data", self.image),
            claim("files", self.directory, accessModes=["ReadWriteMany"]),
            pod("writer", ["data", "files"], "echo one >/data/file; echo many >/files/file; sync; echo written"),
        )
        stage.log_has("writer", "written")

    def snapshot(self, name: str = "moment", of: str = "data") -> None:
        self.stage.apply(self._snapshot(name, of))
        self._ready("volumesnapshot", name)

    def _snapshot(self, name: str, of: str) -> dict:
        return {
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshot",
            "metadata": {"name": name},
            "spec": {"volumeSnapshotClassName": self.snapshots, "source": {"persistentVolumeClaimName": of}},
        }

    def copy(self) -> None:
        """Restore the snapshot and clone the claim."""
        snapshot = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "moment"}
        origin = {"kind": "PersistentVolumeClaim", "name": "data"}
        self.stage.apply(
            claim("restored", self.image, dataSource=snapshot),
            claim("cloned", self.image, dataSource=origin),
            pod("reader", ["restored", "cloned"], "echo $(cat /restored/file) $(cat /cloned/file)"),
        )
        self.stage.log_has("reader", "one one")

    def grow(self) -> None:
        """While a pod uses it; XFS, because some machines let nobody grow a mounted ext4."""
        self.stage.apply(
            storage_class("grows", self.driver, "WaitForFirstConsumer", kind="image", fsType="xfs"),
            claim("grown", "grows", "300Mi"),
            pod("grower", ["grown"], "echo here"),
        )
        self.stage.log_has("grower", "here")
        patch = '{"spec": {"resources": {"requests": {"storage": "350Mi"}}}}'
        self.stage.kubectl("patch", "pvc", "grown", "--type=merge", "-p", patch)

        def grown() -> bool:
            return self.stage.get("pvc", "grown")["status"]["capacity"]["storage"] == "350Mi"

        self.stage.wait(grown, "the claim to grow")

    def modify(self) -> None:
        self.stage.apply(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "VolumeAttributesClass",
                "metadata": {"name": "sequential"},
                "driverName": self.driver,
                "parameters": {"readAheadKiB": "512"},
            },
            storage_class("now", self.driver, "Immediate", kind="image"),
            claim("tuned", "now", volumeAttributesClassName="sequential"),
        )
        patch = '{"spec": {"volumeAttributesClassName": "sequential"}}'
        self.stage.kubectl("patch", "pvc", "data", "--type=merge", "-p", patch)

        def modified() -> bool:
            status = self.stage.get("pvc", "data")["status"]
            return status.get("currentVolumeAttributesClassName") == "sequential"

        self.stage.wait(modified, "the volume to be modified")
        self._bound("tuned")

    def group(self) -> None:
        self.stage.apply(claim("group-a", "now"), claim("group-b", "now"))
        for name in ("group-a", "group-b"):
            self._bound(name)
        self.stage.apply(
            {
                "apiVersion": "groupsnapshot.storage.k8s.io/v1beta2",
                "kind": "VolumeGroupSnapshot",
                "metadata": {"name": "both"},
                "spec": {
                    "volumeGroupSnapshotClassName": self.snapshots,
                    "source": {"selector": {"matchLabels": {"app": "shop"}}},
                },
            }
        )
        self._ready("volumegroupsnapshot", "both")

    def refuse(self) -> None:
        """A clone that is smaller than its source: the claim is told why, again and again."""
        self.stage.apply(claim("never", "now", "32Mi", dataSource={"kind": "PersistentVolumeClaim", "name": "tuned"}))

        self._told_twice("PersistentVolumeClaim", "never")

    def refuse_snapshot(self) -> None:
        """A member cannot leave its group: the snapshot is told why, again and again."""
        members = [s for s in self.stage.get("volumesnapshots")["items"] if s["status"].get("volumeGroupSnapshotName")]
        name = members[0]["metadata"]["name"]
        self.stage.kubectl("delete", "volumesnapshot", name, "--wait=false")
        self._told_twice("VolumeSnapshot", name)

    def _told_twice(self, kind: str, name: str) -> None:
        def told() -> bool:
            about = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
            events = self.stage.get("events", "--field-selector", about)["items"]
            return any(event.get("count", 0) > 1 for event in events)

        self.stage.wait(told, f"{kind} {name} to be told twice")

    def remove(self) -> None:
        stage = self.stage
        stage.kubectl("delete", "pods", "--all", "-n", "default")
        stage.kubectl("delete", "volumegroupsnapshots,volumesnapshots", "--all", "-n", "default", "--wait=false")
        stage.kubectl("delete", "pvc", "--all", "-n", "default", "--wait=false")
        stage.gone("volumegroupsnapshots", "volumesnapshots", "pvc", "pv", "volumesnapshotcontents")
        stage.kubectl("delete", "storageclass", "now", "grows")  # its capacity is published no more
        stage.kubectl("delete", "volumeattributesclass", "sequential")

    def _ready(self, kind: str, name: str) -> None:
        def ready() -> bool:
            return bool(self.stage.get(kind, name).get("status", {}).get("readyToUse"))

        self.stage.wait(ready, f"{kind} {name} to be ready")

    def _bound(self, name: str) -> None:
        def bound() -> bool:
            return self.stage.get("pvc", name)["status"].get("phase") == "Bound"

        self.stage.wait(bound, f"claim {name} to be bound")
