"""Reading JSON and YAML that a client sent, within bounds on depth and on the number of values.

Owns: the bounds, and YAML as JSON has it: no aliases, no dates, no numbers in base 60.
Start reading at: `json_from`, `yaml_from`.

What is read here is walked several times by what follows: a body of three megabytes that is made of a million empty
lists must be refused before that.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from moorage.apiserver.errors import StatusError, bad_request, too_many_values

LIMIT_VALUES = 100_000  # of one body; the largest definitions of custom kinds have some 40,000
LIMIT_DEPTH = 200
LIMIT_YAML_BYTES = 1 << 20  # of what is not JSON as well: it is read a hundred times more slowly
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"?')  # without an end too, or each quote would be a new start

try:
    from yaml import CSafeLoader as _Parser
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeLoader as _Parser  # type: ignore[assignment]


def json_from(data: bytes) -> Any:
    """Raises 400 if the data is no JSON or nested too deeply, 413 if it holds too many values."""
    _check_count(data)
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"couldn't get version/kind; json parse error: {str(error)[:300]}") from error
    if data.count(b"{") + data.count(b"[") > LIMIT_DEPTH:
        check_depth(found)
    return found


def yaml_from(data: bytes) -> Any:
    """Raises 400 if the data is no YAML, is nested too deeply or has aliases, 413 if it is too large."""
    try:
        return json_from(data)  # every JSON document is YAML, and kubectl sends no other
    except StatusError as error:
        if error.http == 413:
            raise
    if len(data) > LIMIT_YAML_BYTES:
        raise too_many_values(f"YAML of more than {LIMIT_YAML_BYTES} bytes is not read; send JSON")
    try:
        parser = _Parser(data.decode())
        try:
            return _document(parser)
        finally:
            parser.dispose()
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise bad_request(f"error converting YAML to JSON: {str(error)[:300]}") from error


def check_depth(value: Any) -> None:
    """Raise 400 if a value is nested too deeply."""
    level = [value]
    for _ in range(LIMIT_DEPTH):
        level = [item for one in level for item in _inside(one) if type(item) in (dict, list)]
        if not level:
            return
    raise bad_request(f"the object is nested too deeply: at most {LIMIT_DEPTH} levels are allowed")


def check_values(value: Any) -> None:
    """Raise 413 if a value holds too many values."""
    open_values, count = [value], 0
    while open_values:
        found = _inside(open_values.pop())
        count += len(found)
        if count > LIMIT_VALUES:
            raise too_many_values(f"the body has more than {LIMIT_VALUES} values")
        open_values.extend(item for item in found if type(item) in (dict, list))


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_count(data: bytes) -> None:
    """Refuse data that has too many values, by counting what separates and opens them."""
    if len(data) <= LIMIT_VALUES or _marks(data) <= LIMIT_VALUES:
        return
    if _marks(_STRINGS.sub(b"", data)) > LIMIT_VALUES:
        raise too_many_values(f"the body has more than {LIMIT_VALUES} values")


def _marks(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


# -- YAML ----

_PLAIN_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
}
_INTEGER = re.compile(r"[-+]?(?:0b[01_]{1,70}|0o?[0-7_]{0,30}|0x[0-9a-fA-F_]{1,20}|[1-9][0-9_]{0,30})")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]{0,300}\.[0-9_]{0,300}|\.[0-9][0-9_]{0,300}|[0-9]{1,300})(?:[eE][-+]?[0-9]{1,4})?"
)
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_TAGS = {
    "tag:yaml.org,2002:str": str, "tag:yaml.org,2002:int": int, "tag:yaml.org,2002:float": float,
    "tag:yaml.org,2002:bool": bool, "tag:yaml.org,2002:null": type(None),
}  # fmt: skip


def _document(parser: Any) -> Any:
    """Build the one document of a stream from the parser's events, without recursion."""
    found: list[Any] = []
    open_values: list[Any] = [found]
    keys: list[str | None] = [None]  # of each open mapping, the key whose value comes next
    for event in _events(parser):
        if isinstance(event, yaml.DocumentStartEvent) and found:
            raise bad_request("error converting YAML to JSON: expected a single document")
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
        elif isinstance(event, yaml.MappingStartEvent):
            value = {}
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
        else:
            if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                open_values.pop()
                keys.pop()
            continue
        into, key = open_values[-1], keys[-1]
        if isinstance(into, list):
            into.append(value)
        elif key is None:
            keys[-1] = _key(value)
        else:
            if key in into:
                raise bad_request(f'error converting YAML to JSON: key "{key[:80]}" already set in map')
            into[key], keys[-1] = value, None
        if isinstance(value, dict | list):
            open_values.append(value)
            keys.append(None)
            if len(keys) > LIMIT_DEPTH:
                raise bad_request(f"the object is nested too deeply: at most {LIMIT_DEPTH} levels are allowed")
    return found[0] if found else None


def _events(parser: Any) -> Iterator[Any]:
    count = 0
    while parser.check_event():
        event = parser.get_event()
        if isinstance(event, yaml.AliasEvent):  # they can make a small body expand without end
            raise bad_request("error converting YAML to JSON: aliases are not accepted")
        count += 1
        if count > LIMIT_VALUES:
            raise too_many_values(f"the body has more than {LIMIT_VALUES} values")
        yield event


def _scalar(event: Any) -> Any:
    text = event.value
    if event.tag is not None and event.tag not in ("!", *_TAGS):
        raise bad_request(f"error converting YAML to JSON: the tag {str(event.tag)[:80]} is not accepted")
    if not event.implicit[0] and event.tag in (None, "!", "tag:yaml.org,2002:str"):
        return text
    value = _plain(text)
    wanted = _TAGS.get(event.tag or "", object)
    if not isinstance(value, wanted):
        raise bad_request(f"error converting YAML to JSON: {text[:80]!r} does not fit its tag")
    return value


def _plain(text: str) -> Any:
    if text in _PLAIN_WORDS:
        return _PLAIN_WORDS[text]
    if len(text) > 700 or text[0] not in "+-.0123456789":
        return text
    if _INTEGER.fullmatch(text):
        digits = text.replace("_", "")
        is_octal = digits.lstrip("+-").startswith("0") and digits.lstrip("+-0").isdigit()
        return int(digits, 8 if is_octal and "o" not in digits else 0)
    if _FLOAT.fullmatch(text):
        number = float(text.replace("_", ""))
        if math.isinf(number):
            raise bad_request(f"error converting YAML to JSON: {text[:80]} is out of range")
        return number
    if _NO_NUMBER.fullmatch(text):
        raise bad_request(f"error converting YAML to JSON: {text} is no JSON value")
    return text


def _key(key: Any) -> str:
    if isinstance(key, dict | list):
        raise bad_request("error converting YAML to JSON: a key must be a text")
    if isinstance(key, bool):
        return "true" if key else "false"
    return "null" if key is None else key if isinstance(key, str) else str(key)
