"""Rules that hold for the metadata of every object.

Owns: names, labels, annotations, finalizers and owner references: their syntax, and what a client may change.
May not touch: storage and HTTP.
Start reading at: `check_metadata`, `begin`, `carry_over`.
"""

import re
import secrets
import time
import uuid
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from moorage.apiserver.errors import (
    FieldError,
    duplicate,
    forbidden_field,
    immutable,
    invalid_value,
    required,
    too_long,
)

Object = dict[str, Any]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_SUFFIX_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, so no words
ANNOTATIONS_LIMIT_BYTES = 256 << 10

SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
    "with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
QUALIFIED_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
    "alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation "
    "is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


def now_text() -> str:
    """The current time as metadata has it: UTC, whole seconds."""
    return _text_of(int(time.time()))


@lru_cache(maxsize=2)
def _text_of(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_subdomain(text: str) -> bool:
    return len(text) <= 253 and _SUBDOMAIN.fullmatch(text) is not None


def is_label(text: str) -> bool:
    return len(text) <= 63 and _LABEL.fullmatch(text) is not None


def qualified_problem(text: str) -> str:
    """Why this is no qualified name such as `example.com/name`; empty when it is one."""
    prefix, slash, name = text.rpartition("/")
    if slash and not is_subdomain(prefix):
        return "prefix part " + SUBDOMAIN_RULE
    if len(name) > 63:
        return "name part must be no more than 63 characters"
    return "" if _QUALIFIED.fullmatch(name) else QUALIFIED_RULE


def check_label_value(field: str, value: str) -> list[FieldError]:
    if len(value) > 63:
        return [invalid_value(field, value, "must be no more than 63 characters")]
    if value and not _QUALIFIED.fullmatch(value):
        return [invalid_value(field, value, VALUE_RULE)]
    return []


def name_problem(name: str, rule: str) -> str:
    """Why this is no name under a rule: subdomain, label or path."""
    if rule == "path":
        bad = name in (".", "..") or "/" in name or "%" in name
        return "may not be '.' or '..' or contain '/' or '%'" if bad else ""
    if rule == "label":
        if len(name) > 63:
            return "must be no more than 63 characters"
        return "" if _LABEL.fullmatch(name) else LABEL_RULE
    if len(name) > 253:
        return "must be no more than 253 characters"
    return "" if _SUBDOMAIN.fullmatch(name) else SUBDOMAIN_RULE


def check_metadata(meta: Object, rule: str) -> list[FieldError]:
    """Every rule on metadata that does not depend on the kind."""
    errors: list[FieldError] = []
    name = meta.get("name", "")
    if not name:
        errors.append(required("metadata.name", "name or generateName is required"))
    elif problem := name_problem(name, rule):
        errors.append(invalid_value("metadata.name", name, problem))
    for key, value in (meta.get("labels") or {}).items():
        if problem := qualified_problem(key):
            errors.append(invalid_value("metadata.labels", key, problem))
        errors += check_label_value("metadata.labels", value)
    annotations = meta.get("annotations") or {}
    for key in annotations:
        if problem := qualified_problem(key.lower()):
            errors.append(invalid_value("metadata.annotations", key, problem))
    if sum(len(k.encode()) + len(v.encode()) for k, v in annotations.items()) > ANNOTATIONS_LIMIT_BYTES:
        errors.append(too_long("metadata.annotations", ANNOTATIONS_LIMIT_BYTES))
    for at, finalizer in enumerate(meta.get("finalizers") or []):
        if problem := qualified_problem(finalizer):
            errors.append(invalid_value(f"metadata.finalizers[{at}]", finalizer, problem))
    return errors + _check_owners(meta.get("ownerReferences") or [])


def _check_owners(owners: list[Object]) -> list[FieldError]:
    errors: list[FieldError] = []
    controllers = 0
    seen = set()
    for at, owner in enumerate(owners):
        where = f"metadata.ownerReferences[{at}]"
        errors += [required(f"{where}.{f}", "must not be empty") for f in ("kind", "name", "uid") if not owner.get(f)]
        if not owner.get("apiVersion"):
            errors.append(invalid_value(f"{where}.apiVersion", "", "version must not be empty"))
        if owner.get("uid") in seen:
            errors.append(duplicate(f"{where}.uid", owner.get("uid")))
        seen.add(owner.get("uid"))
        controllers += bool(owner.get("controller"))
    if controllers > 1:
        errors.append(
            invalid_value("metadata.ownerReferences", len(owners), "Only one reference can have Controller set to true")
        )
    return errors


def generated_name(base: str) -> str:
    """The base, cut to 58 characters, and five random ones."""
    return base[:58] + "".join(secrets.choice(_SUFFIX_ALPHABET) for _ in range(5))


def begin(meta: Object, namespace: str, tracks_generation: bool) -> Object:
    """The metadata of a new object: what only the server may say is said here."""
    kept = {key: meta[key] for key in ("name", "generateName") if meta.get(key)}
    if namespace:
        kept["namespace"] = namespace
    kept["uid"] = str(uuid.uuid4())
    if tracks_generation:
        kept["generation"] = 1
    kept["creationTimestamp"] = now_text()
    for key in ("labels", "annotations", "ownerReferences", "finalizers", "managedFields"):
        if meta.get(key):
            kept[key] = meta[key]
    return kept


_FIXED = (
    "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "generateName",
    "namespace", "name", "selfLink", "resourceVersion",
)  # fmt: skip


def carry_over(new: Object, old: Object) -> Object:
    """The metadata of an update: what a client cannot change comes from the old object."""
    kept = {key: old[key] for key in _FIXED if key in old}
    for key in ("labels", "annotations", "ownerReferences", "finalizers", "managedFields"):
        if new.get(key):
            kept[key] = new[key]
    return kept


def check_update(new: Object, old: Object) -> list[FieldError]:
    """What an update may not do to metadata."""
    errors: list[FieldError] = []
    if old.get("deletionTimestamp"):
        added = [f for f in new.get("finalizers") or [] if f not in (old.get("finalizers") or [])]
        if added:
            why = f"no new finalizers can be added if the object is being deleted, found new finalizers {added!r}"
            errors.append(forbidden_field("metadata.finalizers", why))
    if new.get("name") != old.get("name"):
        errors.append(immutable("metadata.name", new.get("name")))
    return errors
