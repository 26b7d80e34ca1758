"""What the client can read and what it sends: Accept and Content-Type.

Owns: choosing among JSON, YAML, Table and PartialObjectMetadata; reading bodies as JSON or YAML.
May not touch: storage.
Start reading at: `chosen`, `document_from`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import yaml

from moorage.apiserver.errors import bad_request, not_acceptable, unsupported_media
from moorage.apiserver.formats import protobuf

JSON = "application/json"
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


class _Loader(yaml.SafeLoader):
    """YAML as JSON has it: no dates, and text keys."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


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


def json_from(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"couldn't get version/kind; json parse error: {error}") from error


def yaml_from(data: bytes) -> Any:
    """YAML without anchors: aliases can make a small body expand without end."""
    try:
        text = data.decode()
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=_Loader)):
            raise bad_request("yaml: aliases are not accepted")
        return _plain(yaml.load(text, Loader=_Loader))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise bad_request(f"error converting YAML to JSON: {str(error)[:300]}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise bad_request(f"error converting YAML to JSON: {type(value).__name__} is no JSON value")


def _key(key: Any) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    return key if isinstance(key, str) else str(key)


def yaml_of(body: bytes) -> bytes:
    """JSON bytes as YAML."""
    text: str = yaml.safe_dump(msgspec.json.decode(body), sort_keys=False, allow_unicode=True)
    return text.encode()
