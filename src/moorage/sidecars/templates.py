"""`${pvc.name}` and friends: references to secrets that a class spells as templates.

Owns: expansion, the check of what comes out, and finding a pair of keys in parameters. Pure; reading the
secret itself is `secrets.py`.
Start reading at: `reference_from`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moorage.kube.objects import SecretReference
from moorage.sidecars.errors import BadParameters
from moorage.sidecars.names import RESERVED_PREFIX

_TOKEN = re.compile(r"\$\{([^}]*)\}|\$([A-Za-z_][A-Za-z0-9_]*|[*#$@!?0-9-])")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


@dataclass(frozen=True, slots=True)
class SecretKeys:
    """Which parameters name a secret: today's pair, and the deprecated pair where there was one."""

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


def expand(template: str, tokens: Mapping[str, str]) -> str:
    """The text with its tokens replaced; an unknown token is an error that lists all of them."""
    unknown: list[str] = []

    def replace(match: re.Match[str]) -> str:
        token = match[1] if match[1] is not None else match[2]
        if token not in tokens:
            unknown.append(token)
            return ""
        return tokens[token]

    text = _TOKEN.sub(replace, template)
    if unknown:
        raise BadParameters(f"{template!r}: unknown tokens {', '.join(unknown)}; known are {', '.join(sorted(tokens))}")
    return text


def template_of(parameters: Mapping[str, str], keys: SecretKeys) -> tuple[str, str] | None:
    """The (name, namespace) templates under a pair of keys; both must be there and not empty, or neither."""
    found = [_pair_in(parameters, keys.name, keys.namespace), _pair_in(parameters, keys.old_name, keys.old_namespace)]
    if found[0] is not None and found[1] is not None:
        raise BadParameters(f"both {keys.name} and the deprecated {keys.old_name} are set; keep the first")
    return found[0] or found[1]


def reference_from(
    parameters: Mapping[str, str],
    keys: SecretKeys,
    name_tokens: Mapping[str, str],
    namespace_tokens: Mapping[str, str],
    fallback: SecretKeys | None = None,
) -> SecretReference | None:
    """The secret that a class's parameters name, for these tokens; None when they name none."""
    templates = template_of(parameters, keys)
    if templates is None and fallback is not None:
        templates = template_of(parameters, fallback)
    if templates is None:
        return None
    name, namespace = expand(templates[0], name_tokens), expand(templates[1], namespace_tokens)
    if not _LABEL.fullmatch(namespace):
        raise BadParameters(f"{templates[1]!r} gives {namespace!r}, which is not a namespace")
    if len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        raise BadParameters(f"{templates[0]!r} gives {name!r}, which is not the name of a secret")
    return SecretReference(name=name, namespace=namespace)


def _pair_in(parameters: Mapping[str, str], name_key: str, namespace_key: str) -> tuple[str, str] | None:
    if not name_key or (name_key not in parameters and namespace_key not in parameters):
        return None
    name, namespace = parameters.get(name_key, ""), parameters.get(namespace_key, "")
    if not name or not namespace:
        raise BadParameters(f"{name_key} and {namespace_key} must both be set and not empty, or both be left out")
    return name, namespace
