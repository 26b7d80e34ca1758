"""What the client can read and what it sends: Accept and Content-Type.

Owns: choosing among JSON, YAML, protobuf, Table and PartialObjectMetadata.
May not touch: storage.
Start reading at: `chosen`, `document_from`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import yaml

from moorage.apiserver.errors import not_acceptable, unsupported_media
from moorage.apiserver.formats import protobuf
from moorage.apiserver.formats.decode import json_from, yaml_from

JSON = "application/json"
LIMIT_YAML_ANSWER = 512 << 10
YAML = "application/yaml"
PROTOBUF = "application/vnd.kubernetes.protobuf"


@dataclass(frozen=True, slots=True)
class Representation:
    """One form of an answer: its media type, and what the object is turned into."""

    media: str = JSON
    form: str = ""  # Table, PartialObjectMetadata, PartialObjectMetadataList
    version: str = "v1"
    include: str = ""  # what of each object goes along in a Table: Metadata, Object or None


_FORMS = ("Table", "PartialObjectMetadata", "PartialObjectMetadataList")


@lru_cache(maxsize=256)
def chosen(accept: str) -> Representation:
    """The first form in the Accept header that this server can give; 406 when there is none."""
    if not accept.strip():
        return Representation()
    for entry in accept.split(","):
        media, *pairs = [part.strip() for part in entry.split(";")]
        parameters = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        form = parameters.get("as", "")
        if media in ("*/*", "application/*") and not form:
            return Representation()
        if media not in (JSON, YAML):
            continue
        if not form:
            return Representation(media)
        if form in _FORMS and parameters.get("g") == "meta.k8s.io" and parameters.get("v") in ("v1", "v1beta1"):
            return Representation(media, form, parameters["v"])
    raise not_acceptable(f"{JSON}, {YAML}")


def document_from(data: bytes, content_type: str) -> Any:
    """The body of a create or update."""
    media = content_type.split(";")[0].strip().lower()
    if media in ("", JSON, "text/plain", "application/octet-stream", "application/x-www-form-urlencoded"):
        return json_from(data)
    if media == YAML:
        return yaml_from(data)
    if media == PROTOBUF:
        return protobuf.document_from(data)
    raise unsupported_media(
        f"the body of the request was in an unknown format - accepted media types include: {JSON}, {YAML}, {PROTOBUF}"
    )


def yaml_of(body: bytes) -> bytes:
    """JSON bytes as YAML. Raises 406 if they are many, because writing YAML is slow."""
    if len(body) > LIMIT_YAML_ANSWER:
        raise not_acceptable(f"{JSON} for an answer of {len(body)} bytes")
    text: str = yaml.dump(msgspec.json.decode(body), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text.encode()


_Dumper = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
