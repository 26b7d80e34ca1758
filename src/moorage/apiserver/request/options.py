"""What a request asks for beside its path: the query parameters, read and checked once.

Owns: `Options`, `Call`, `DeleteOptions` and the words Kubernetes refuses bad ones with.
May not touch: storage.
Start reading at: `options_from`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from moorage.apiserver.errors import (
    FieldError,
    StatusError,
    bad_request,
    forbidden_field,
    invalid,
    invalid_value,
    not_supported,
)
from moorage.apiserver.kinds.registry import Kind, Object
from moorage.errors import InvalidRequest
from moorage.kube.selectors import FieldMatch, LabelMatch


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of one request."""

    labels: LabelMatch = field(default_factory=LabelMatch)
    fields: FieldMatch = field(default_factory=FieldMatch)
    limit: int = 0
    token: str = ""
    version: str = ""
    version_match: str = ""
    is_watch: bool = False
    wants_bookmarks: bool = False
    sends_initial: bool | None = None
    timeout_s: float | None = None
    is_dry_run: bool = False
    field_validation: str = "Warn"
    field_manager: str = ""
    force: bool | None = None

    @property
    def has_selectors(self) -> bool:
        return bool(self.labels.requirements or self.fields.terms)


class WriteGuard:
    """The limits on a write beyond the verb of its request. This one has none: the server's own writes use it."""

    __slots__ = ()

    def check_create(self) -> None:
        """Raise 403 if an update or a patch may not create the object."""
        return

    def check_write(self, stored_as: str, new: Object, old: Object | None) -> None:
        """Raise 403 if the object may not be stored with this content."""
        return


UNGUARDED = WriteGuard()


@dataclass(slots=True)
class Call:
    """One request on one resource: what, whose, and how."""

    kind: Kind
    namespace: str
    name: str
    subresource: str
    options: Options
    user: str = ""
    user_agent: str = ""
    warnings: list[str] = field(default_factory=list)
    guard: WriteGuard = UNGUARDED
    size_bytes: int = 0  # of the body

    @property
    def manager(self) -> str:
        """Who is recorded as the owner of fields."""
        return self.options.field_manager or self.user_agent.split("/")[0][:128] or "unknown"


@dataclass(slots=True)
class DeleteOptions:
    """How to delete; a missing field means the kind's default."""

    grace_s: int | None = None
    uid: str = ""
    version: str = ""
    propagation: str = ""
    is_dry_run: bool = False


def options_from(query: Mapping[str, str]) -> Options:
    """The options of a request; what no client may ask is refused with 400 or 422."""
    if not query:
        return _PLAIN
    if len(query) == 1 and "fieldManager" in query:
        return _managed(query["fieldManager"])
    validation = query.get("fieldValidation", "") or "Warn"
    if validation not in ("Ignore", "Warn", "Strict"):
        raise invalid("CreateOptions", "meta.k8s.io", "", [
            not_supported("fieldValidation", validation, ["", "Ignore", "Warn", "Strict"])])  # fmt: skip
    dry_run = query.get("dryRun", "")
    if dry_run not in ("", "All"):
        raise invalid("PatchOptions", "meta.k8s.io", "", [not_supported("dryRun", dry_run, ["All"])])
    initial = query.get("sendInitialEvents")
    options = Options(
        labels=_labels(query.get("labelSelector", "")),
        fields=_fields(query.get("fieldSelector", "")),
        limit=_number(query, "limit"),
        token=query.get("continue", ""),
        version=_version(query.get("resourceVersion", "")),
        version_match=query.get("resourceVersionMatch", ""),
        is_watch=flag(query, "watch"),
        wants_bookmarks=flag(query, "allowWatchBookmarks"),
        sends_initial=None if initial in (None, "") else flag(query, "sendInitialEvents"),
        timeout_s=float(_number(query, "timeoutSeconds")) if query.get("timeoutSeconds") else None,
        is_dry_run=dry_run == "All",
        field_validation=validation,
        field_manager=_manager(query.get("fieldManager", "")),
        force=flag(query, "force") if "force" in query else None,
    )
    _check_listing(options)
    return options


_PLAIN = Options()


@lru_cache(maxsize=256)
def _managed(manager: str) -> Options:
    """What most writes ask for, read once for each writer."""
    return Options(field_manager=_manager(manager))


def _check_listing(options: Options) -> None:
    errors: list[FieldError] = []
    match = options.version_match
    if options.sends_initial is not None:
        if not options.is_watch:
            errors.append(forbidden_field("sendInitialEvents", "sendInitialEvents is forbidden for list"))
        elif match != "NotOlderThan":
            why = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            errors.append(forbidden_field("resourceVersionMatch", why))
    elif match and options.is_watch:
        errors.append(forbidden_field("resourceVersionMatch", "resourceVersionMatch is forbidden for watch"))
    if match and not options.is_watch:
        errors += _check_match(options)
    if errors:
        raise invalid("ListOptions", "meta.k8s.io", "", errors)
    if options.token and options.version not in ("", "0"):
        raise bad_request("specifying resource version is not allowed when using continue")


def _check_match(options: Options) -> list[FieldError]:
    where = "resourceVersionMatch"
    if options.version_match not in ("Exact", "NotOlderThan"):
        return [not_supported(where, options.version_match, ["Exact", "NotOlderThan", ""])]
    if not options.version:
        return [forbidden_field(where, f"{where} is forbidden unless resourceVersion is provided")]
    if options.token:
        return [forbidden_field(where, f"{where} is forbidden when continue is provided")]
    if options.version_match == "Exact" and options.version == "0":
        return [forbidden_field(where, f'{where} "exact" is forbidden for resourceVersion "0"')]
    return []


def _labels(text: str) -> LabelMatch:
    try:
        return LabelMatch.parse(text)
    except InvalidRequest as error:
        raise bad_request(f"unable to parse requirement: {error}") from error


def _fields(text: str) -> FieldMatch:
    try:
        return FieldMatch.parse(text)
    except InvalidRequest as error:
        raise bad_request(f"invalid field selector: {error}") from error


def flag(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name)
    if text is None:
        return False
    if text.lower() in ("", "1", "t", "true"):
        return True
    if text.lower() in ("0", "f", "false"):
        return False
    raise bad_request(f'strconv.ParseBool: parsing "{text[:80]}": invalid syntax ({name})')


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name) or "0"
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise bad_request(f'strconv.ParseInt: parsing "{text[:80]}": invalid syntax ({name})')
    return max(0, int(text))


def _version(text: str) -> str:
    if text and not re.fullmatch(r"\d{1,19}", text):
        raise bad_request(f'Invalid value: "{text[:80]}": strconv.ParseUint: invalid syntax (resourceVersion)')
    return text


def _manager(text: str) -> str:
    if len(text) > 128 or not text.isprintable():
        error = invalid_value("fieldManager", text[:200], "may not be more than 128 bytes and should be printable")
        raise invalid("PatchOptions", "meta.k8s.io", "", [error])
    return text


def delete_options_from(body: Any, query: Mapping[str, str]) -> DeleteOptions:
    """The body's DeleteOptions, or those of the query when there is no body."""
    if body is None:
        body = {
            "gracePeriodSeconds": _number(query, "gracePeriodSeconds") if query.get("gracePeriodSeconds") else None,
            "propagationPolicy": query.get("propagationPolicy"),
            "orphanDependents": flag(query, "orphanDependents") if "orphanDependents" in query else None,
        }
    if not isinstance(body, dict):
        raise bad_request("DeleteOptions must be an object")
    if body.get("kind") not in (None, "", "DeleteOptions"):
        raise bad_request(f"expected DeleteOptions, found {str(body.get('kind'))[:80]}")
    preconditions = body.get("preconditions") or {}
    grace = body.get("gracePeriodSeconds")
    policy = body.get("propagationPolicy") or ""
    if grace is not None and (not isinstance(grace, int) or isinstance(grace, bool)):
        raise bad_request("json: cannot unmarshal into Go struct field DeleteOptions.gracePeriodSeconds of type int64")
    if not isinstance(preconditions, dict):
        raise bad_request("json: cannot unmarshal into Go struct field DeleteOptions.preconditions")
    if policy not in ("", "Orphan", "Background", "Foreground"):
        allowed = ["Background", "Foreground", "Orphan"]
        raise invalid("DeleteOptions", "meta.k8s.io", "", [not_supported("propagationPolicy", policy, allowed)])
    if body.get("orphanDependents") is True:
        policy = policy or "Orphan"
    dry = body.get("dryRun") or ([query["dryRun"]] if query.get("dryRun") else [])
    return DeleteOptions(
        grace_s=grace,
        uid=str(preconditions.get("uid") or ""),
        version=str(preconditions.get("resourceVersion") or ""),
        propagation=policy,
        is_dry_run="All" in dry,
    )


def refuse_unknown_fields(kind: Kind, name: str, unknown: list[str], call: Call) -> None:
    """Strict refuses unknown fields, Warn adds a Warning header for each, Ignore is silent."""
    if not unknown or call.options.field_validation == "Ignore":
        return
    texts = [f'unknown field "{path}"' for path in unknown]
    if call.options.field_validation == "Strict":
        raise StatusError(
            400,
            "BadRequest",
            f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: '
            f"strict decoding error: {', '.join(texts)}",
        )
    call.warnings.extend(texts)
