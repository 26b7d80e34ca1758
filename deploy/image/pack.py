"""Pack a folder as an OCI image archive, byte for byte the same for the same content.

Owns: the layer, configuration, manifest and index of the image. Usage: pack.py ROOT OUTPUT.tar VERSION
"""

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

REFERENCE = "localhost/moorage"
_LABELS = {
    "org.opencontainers.image.title": "moorage",
    "org.opencontainers.image.description": "Persistent volumes for containers: CSI plugin, sidecars and controllers",
    "org.opencontainers.image.licenses": "Apache-2.0",
}


def main() -> None:
    root, output, version = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    plain = layer_of(root, epoch)
    layer = compressed(plain)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    config = encoded(image_config(hashlib.sha256(plain).hexdigest(), created, version))
    manifest = encoded(image_manifest(config, layer))
    index = encoded(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [
                {
                    **descriptor("application/vnd.oci.image.manifest.v1+json", manifest),
                    "annotations": {
                        "org.opencontainers.image.ref.name": version,
                        # What containerd calls the image after an import; it is the name in the manifests.
                        "io.containerd.image.name": f"{REFERENCE}:{version}",
                    },
                    "platform": {"architecture": architecture(), "os": "linux"},
                }
            ],
        }
    )
    files = {"oci-layout": encoded({"imageLayoutVersion": "1.0.0"}), "index.json": index}
    files |= {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in (config, layer, manifest)}
    write_archive(output, files, epoch)
    sys.stdout.write(f"{output} sha256:{hashlib.sha256(manifest).hexdigest()} {len(layer) >> 20} MiB compressed\n")


def layer_of(root: Path, epoch: int) -> bytes:
    """The tar of a folder in name order, all of it root's, with one time for all files."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(root.rglob("*")):
            member = tar.gettarinfo(path, str(path.relative_to(root)))
            if member.islnk():  # two names of one file, in whatever order: write it twice
                member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.stat().st_size
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = epoch
            if not member.issym():
                member.mode = (
                    0o1777 if member.mode & 0o1000 else 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                )
            with path.open("rb") if member.isreg() else io.BytesIO() as content:
                tar.addfile(member, content if member.isreg() else None)
    return target.getvalue()


def compressed(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=6, mtime=0)


def image_config(diff_id: str, created: str, version: str) -> dict[str, Any]:
    return {
        "created": created,
        "architecture": architecture(),
        "os": "linux",
        "config": {
            "Entrypoint": ["/usr/bin/moorage"],
            "Cmd": ["--help"],
            "Env": [
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "PYTHONDONTWRITEBYTECODE=1",
                "PYTHONUNBUFFERED=1",
                "PYTHONNOUSERSITE=1",
            ],
            "User": "65532:65532",
            "WorkingDir": "/",
            "Labels": {**_LABELS, "org.opencontainers.image.version": version},
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff_id}"]},
        "history": [{"created": created, "created_by": "deploy/image/build"}],
    }


def image_manifest(config: bytes, layer: bytes) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar+gzip", layer)],
    }


def descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}


def encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def write_archive(output: Path, files: dict[str, bytes], epoch: int) -> None:
    with tarfile.open(output, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(files[name]), epoch, 0o644
            archive.addfile(entry, io.BytesIO(files[name]))


if __name__ == "__main__":
    main()
