"""Equal texts of many objects held once: most of what ten thousand volumes say, they all say.

Decoded objects have each their own copy of every text: of annotation keys, class and driver names, access modes,
finalizers. A cache that keeps them for long keeps one copy instead.

Owns: which texts are worth it. Objects keep their content, and Python frees a text that no object refers to.
Start reading at: `shared`.
"""

import sys
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

_UNIQUE = frozenset({"name", "uid", "resource_version", "volume_handle", "volume_name"})  # not worth looking up
_LONGEST = 128  # longer texts are of one object; Python 3.12 keeps what is interned for ever, and tenants write it


def shared(obj: T) -> T:
    """The same object, with each text that recurs replaced by the one copy of it. For lists, which bring all
    objects at once, and not for every change: it looks at every field."""
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
    return sys.intern(value) if type(value) is str and len(value) <= _LONGEST else value
