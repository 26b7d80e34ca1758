"""Secrets for CSI calls: which one the parameters of a class name, and reading it.

Owns: expanding `${pvc.name}` and other tokens, checking the result, and decoding the secret.
Start reading at: `reference_from`, `read_secret`.

Values go into the request and nowhere else: no log, no cache, no error message.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass

from moorage.errors import MoorageError
from moorage.kube.api.client import Client
from moorage.kube.errors import NotFound
from moorage.kube.names import RESERVED_PREFIX
from moorage.kube.objects.core import Secret
from moorage.kube.objects.meta import SecretReference

# Both ${name} and $name, as the official sidecars and the snapshot controller accept them.
_TOKEN = re.compile(r"\$\{([^}]*)\}|\$([A-Za-z_][A-Za-z0-9_]*|[*#$@!?0-9-])")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


class BadSecret(MoorageError):
    """Parameters name a secret in a way that cannot be carried out, or the secret holds what CSI cannot carry."""

    code = "INVALID_ARGUMENT"


class MissingSecret(BadSecret):
    """The secret does not exist (yet)."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class SecretKeys:
    """Which parameters name a secret: the current pair, and the deprecated pair if there was one."""

    name: str
    namespace: str
    old_name: str = ""
    old_namespace: str = ""


def _pair(what: str, old: str = "") -> SecretKeys:
    stem = f"{RESERVED_PREFIX}{what}secret"
    return SecretKeys(f"{stem}-name", f"{stem}-namespace", old and f"{old}SecretName", old and f"{old}SecretNamespace")


DEFAULT = _pair("")
PROVISION = _pair("provisioner-", "csiProvisioner")
CONTROLLER_PUBLISH = _pair("controller-publish-", "csiControllerPublish")
NODE_STAGE = _pair("node-stage-", "csiNodeStage")
NODE_PUBLISH = _pair("node-publish-", "csiNodePublish")
CONTROLLER_EXPAND = _pair("controller-expand-")
NODE_EXPAND = _pair("node-expand-")
CONTROLLER_MODIFY = _pair("controller-modify-")
SNAPSHOT = _pair("snapshotter-")
SNAPSHOT_LIST = _pair("snapshotter-list-")
GROUP_SNAPSHOT = _pair("group-snapshotter-")
GROUP_SNAPSHOT_GET = _pair("group-snapshotter-get-")


async def read_secret(client: Client, reference: SecretReference | None) -> dict[str, str]:
    """Return the secret's entries as text, none without a reference.

    Raises MissingSecret if the secret does not exist, BadSecret if an entry is not UTF-8 text.
    """
    if reference is None or not reference.name:
        return {}
    try:
        secret = await client.get(Secret, reference.name, reference.namespace)
    except NotFound:
        raise MissingSecret(f"secret {reference.namespace}/{reference.name} does not exist") from None
    try:
        return {key: base64.b64decode(value).decode() for key, value in secret.data.items()}
    except (binascii.Error, UnicodeDecodeError):
        raise BadSecret(
            f"secret {reference.namespace}/{reference.name} has an entry that is not UTF-8 text, which CSI requires"
        ) from None


def expand(template: str, tokens: Mapping[str, str]) -> str:
    """Return the text with its tokens replaced. Raises BadSecret, listing every unknown token."""
    unknown: list[str] = []

    def replace(match: re.Match[str]) -> str:
        token = match[1] if match[1] is not None else match[2]
        if token not in tokens:
            unknown.append(token)
            return ""
        return tokens[token]

    text = _TOKEN.sub(replace, template)
    if unknown:
        raise BadSecret(f"{template!r}: unknown tokens {', '.join(unknown)}; known are {', '.join(sorted(tokens))}")
    return text


def template_of(parameters: Mapping[str, str], keys: SecretKeys) -> tuple[str, str] | None:
    """Return the (name, namespace) templates under a pair of keys. Returns None if the parameters have neither.

    Raises BadSecret if only one of them is set, or one is empty.
    """
    current = _pair_in(parameters, keys.name, keys.namespace)
    old = _pair_in(parameters, keys.old_name, keys.old_namespace)
    if current is not None and old is not None:
        raise BadSecret(f"both {keys.name} and the deprecated {keys.old_name} are set; keep the first")
    return current or old


def reference_from(
    parameters: Mapping[str, str],
    keys: SecretKeys,
    name_tokens: Mapping[str, str],
    namespace_tokens: Mapping[str, str],
    fallback: SecretKeys | None = None,
) -> SecretReference | None:
    """Return the secret that a class's parameters name, for these tokens. Returns None if they name none."""
    templates = template_of(parameters, keys)
    if templates is None and fallback is not None:
        templates = template_of(parameters, fallback)
    if templates is None:
        return None
    name, namespace = expand(templates[0], name_tokens), expand(templates[1], namespace_tokens)
    if not _LABEL.fullmatch(namespace):
        raise BadSecret(f"{templates[1]!r} gives {namespace!r}, which is not a namespace")
    if len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        raise BadSecret(f"{templates[0]!r} gives {name!r}, which is not the name of a secret")
    return SecretReference(name=name, namespace=namespace)


def _pair_in(parameters: Mapping[str, str], name_key: str, namespace_key: str) -> tuple[str, str] | None:
    if not name_key or (name_key not in parameters and namespace_key not in parameters):
        return None
    name, namespace = parameters.get(name_key, ""), parameters.get(namespace_key, "")
    if not name or not namespace:
        raise BadSecret(f"{name_key} and {namespace_key} must both be set and not empty, or both be left out")
    return name, namespace
