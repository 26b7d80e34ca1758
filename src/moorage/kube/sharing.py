"""Equal texts of many objects held once: most of what ten thousand volumes say, they all say.

Decoded objects have each their own copy of every text: of annotation keys, class and driver names, access modes,
finalizers. A cache that keeps them for long keeps one copy instead, and a third of its memory less.

Owns: the table of texts. What an object says is not changed.
Start reading at: `shared`.
"""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

_MOST = 8192  # texts; a table full of ones that do not recur is begun anew
_UNIQUE = frozenset({"name", "uid", "resource_version", "volume_handle", "volume_name"})  # not worth looking up

_texts: dict[str, str] = {}


def shared(obj: T) -> T:
    """The same object, with each text that recurs replaced by the one copy of it. Costs some 10 µs: for lists, which
    bring all objects at once, and not for every change."""
    for name in obj.__struct_fields__:
        value = getattr(obj, name)
        if not value:
            continue
        kind = type(value)
        if kind is str:
            if name not in _UNIQUE:
                msgspec.structs.force_setattr(obj, name, _text(value))
        elif kind is dict:
            msgspec.structs.force_setattr(obj, name, {_text(key): _text(each) for key, each in value.items()})
        elif kind is list:
            msgspec.structs.force_setattr(obj, name, [_one(each) for each in value])
        else:
            _one(value)
    return obj


def _one(value: Any) -> Any:
    return shared(value) if isinstance(value, msgspec.Struct) else _text(value)


def _text(value: Any) -> Any:
    if type(value) is not str:
        return value
    found = _texts.get(value)
    if found is None:
        if len(_texts) >= _MOST:
            _texts.clear()
        _texts[value] = found = value
    return found
