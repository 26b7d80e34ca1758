"""Write the definitions of the snapshot kinds beside this file, from those that the embedded API server starts with.

Owns: the YAML files and the kustomization of this folder. Run it with .venv/bin/python after the kinds have changed.
"""

from pathlib import Path
from typing import Any

import yaml

from moorage.apiserver.kinds.snapshot_crds import snapshot_definitions

HERE = Path(__file__).parent
# Groups that end in k8s.io are protected: the API server wants to be told where the kind was approved.
_APPROVED = {
    "volumesnapshots": 814,
    "volumesnapshotcontents": 955,
    "volumesnapshotclasses": 814,
    "volumegroupsnapshots": 1337,
    "volumegroupsnapshotcontents": 1337,
    "volumegroupsnapshotclasses": 1337,
}


def main() -> None:
    for name, document in documents().items():
        (HERE / name).write_text(text_of(document))


def documents() -> dict[str, dict[str, Any]]:
    """The files of this folder by name."""
    made = {f"{d['spec']['names']['plural']}.yaml": _definition(d) for d in snapshot_definitions()}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(made),
    }
    return {**made, "kustomization.yaml": kustomization}


def text_of(document: dict[str, Any]) -> str:
    head = "# Written by generate.py; a test compares it with the kinds of the embedded API server.\n"
    return head + yaml.dump(document, Dumper=_Plain, sort_keys=False, width=120)


def _definition(definition: dict[str, Any]) -> dict[str, Any]:
    plural = definition["spec"]["names"]["plural"]
    approved = f"https://github.com/kubernetes-csi/external-snapshotter/pull/{_APPROVED[plural]}"
    metadata = {
        "name": definition["metadata"]["name"],
        "annotations": {"api-approved.kubernetes.io": approved},
        "labels": {"app.kubernetes.io/part-of": "moorage"},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": definition["spec"],
    }


class _Plain(yaml.SafeDumper):
    """Writes shared parts in full: an anchor in a manifest surprises its reader."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    main()
