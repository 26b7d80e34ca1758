"""Kubernetes' extensions of CEL: functions on lists, regular expressions, sets, URLs, IP addresses and quantities.

Owns: their declarations and what they compute. CEL's own functions and its string, math and optional extensions come
with the library.
Start reading at: `kubernetes_functions`.

The library has no opaque types. A quantity, a URL, an address and a network are maps of texts with one key, which
names the type. Equal values are equal maps, because each text is written in its canonical form.
"""

import ipaddress
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import re2
from cel_expr_python import cel

from moorage.errors import InvalidRequest
from moorage.kube.quantity import Quantity

_T = cel.Type
_LIST = _T.List(_T.DYN)
_BOXED = _T.Map(_T.STRING, _T.STRING)
_RE2 = re2.Options()
_RE2.log_errors = False

Boxed = dict[str, str]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _holds(read: Callable[[str], Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            read(text)
        except (ValueError, InvalidRequest):
            return False
        return True

    return check


def _boxed(name: str, read: Callable[[str], Any]) -> Callable[[str], Boxed]:
    return lambda text: {name: str(read(text))}


def _quantity(text: str) -> Quantity:
    return Quantity.parse(text)


def _canonical_quantity(text: str) -> str:
    return str(_quantity(text).amount.normalize())


def _amount(boxed: Boxed | int) -> Any:
    return boxed if isinstance(boxed, int) else _quantity(boxed["quantity"]).amount


def _quantity_of(amount: Any) -> Boxed:
    return {"quantity": str(amount.normalize())}


def _as_integer(boxed: Boxed) -> int:
    amount = _amount(boxed)
    if amount != amount.to_integral_value() or abs(amount) >= 1 << 63:
        raise ValueError("the quantity is not an integer of 64 bits")
    return int(amount)


def _url(text: str) -> str:
    parts = urlsplit(text)
    if any(ord(c) <= 32 or ord(c) == 127 for c in text) or not (text.startswith("/") or parts.scheme):
        raise ValueError("not an absolute URL or path")
    _ = parts.port  # raises ValueError for a port that is no number
    return text


def _parts(boxed: Boxed) -> SplitResult:
    return urlsplit(boxed["url"])


def _port(boxed: Boxed) -> str:
    found = _parts(boxed).port
    return "" if found is None else str(found)


def _host(boxed: Boxed) -> str:
    return _parts(boxed).netloc.rpartition("@")[2]


def _ip(text: str) -> Address:
    found = ipaddress.ip_address(text)
    if "%" in text or (isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped):
        raise ValueError("zones and IPv4-mapped addresses are not accepted")
    return found


def _cidr(text: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    if "/" not in text:
        raise ValueError("not a network")
    _ip(text.split("/")[0])
    return ipaddress.ip_interface(text)


def _address(value: Boxed | str) -> Address:
    return _ip(value if isinstance(value, str) else value["ip"])


def _network(value: Boxed | str) -> Network:
    return _cidr(value if isinstance(value, str) else value["cidr"]).network


def _contains_network(outer: Boxed, inner: Boxed | str) -> bool:
    one, other = _network(outer), _network(inner)
    return one.version == other.version and other.subnet_of(one)  # type: ignore[arg-type]


def _pattern(text: str) -> Any:
    return re2.compile(text, _RE2)


def _find_all(text: str, pattern: str, limit: int = -1) -> list[str]:
    found: list[str] = []
    for match in _pattern(pattern).finditer(text):
        if 0 <= limit <= len(found):
            break
        found.append(match.group(0))
    return found


def _find(text: str, pattern: str) -> str:
    match = _pattern(pattern).search(text)
    return match.group(0) if match else ""


def _is_in(item: Any, items: list[Any]) -> bool:
    return any(type(item) is type(other) and item == other for other in items)


def _contains_all(one: list[Any], other: list[Any]) -> bool:
    return all(_is_in(item, one) for item in other)


def _index(items: list[Any], item: Any) -> int:
    return next((at for at, other in enumerate(items) if other == item), -1)


def _last_index(items: list[Any], item: Any) -> int:
    return next((at for at in range(len(items) - 1, -1, -1) if items[at] == item), -1)


def _is_sorted(items: list[Any]) -> bool:
    return all(one <= other for one, other in itertools.pairwise(items))


_S, _B, _I, _D = _T.STRING, _T.BOOL, _T.INT, _T.DYN
_BOOLS: dict[str, Callable[[Boxed], bool]] = {
    "ip.isUnspecified": lambda a: _address(a).is_unspecified,
    "isLoopback": lambda a: _address(a).is_loopback,
    "isLinkLocalMulticast": lambda a: (
        _address(a) in ipaddress.ip_network("224.0.0.0/24") or _address(a) in ipaddress.ip_network("ff02::/16")
    ),
    "isLinkLocalUnicast": lambda a: _address(a).is_link_local,
    "isGlobalUnicast": lambda a: (
        not (
            _address(a).is_unspecified
            or _address(a).is_loopback
            or _address(a).is_multicast
            or _address(a).is_link_local
        )
    ),
    "isInteger": lambda a: _amount(a) == _amount(a).to_integral_value(),
}

# name, is it called on its first argument, result, arguments, implementation
_TABLE: list[tuple[str, bool, Any, list[Any], Callable[..., Any]]] = [
    ("isSorted", True, _B, [_LIST], _is_sorted),
    ("sum", True, _D, [_LIST], lambda items: sum(items)),
    ("min", True, _D, [_LIST], lambda items: min(items)),
    ("max", True, _D, [_LIST], lambda items: max(items)),
    ("indexOf", True, _I, [_LIST, _D], _index),
    ("lastIndexOf", True, _I, [_LIST, _D], _last_index),
    ("find", True, _S, [_S, _S], _find),
    ("findAll", True, _T.List(_S), [_S, _S], _find_all),
    ("findAll", True, _T.List(_S), [_S, _S, _I], _find_all),
    ("sets.contains", False, _B, [_LIST, _LIST], _contains_all),
    ("sets.equivalent", False, _B, [_LIST, _LIST], lambda a, b: _contains_all(a, b) and _contains_all(b, a)),
    ("sets.intersects", False, _B, [_LIST, _LIST], lambda a, b: any(_is_in(item, b) for item in a)),
    ("isURL", False, _B, [_S], _holds(_url)),
    ("url", False, _BOXED, [_S], _boxed("url", _url)),
    ("getScheme", True, _S, [_BOXED], lambda u: _parts(u).scheme),
    ("getHost", True, _S, [_BOXED], _host),
    ("getHostname", True, _S, [_BOXED], lambda u: _parts(u).hostname or ""),
    ("getPort", True, _S, [_BOXED], _port),
    ("getEscapedPath", True, _S, [_BOXED], lambda u: _parts(u).path),
    ("getQuery", True, _T.Map(_S, _T.List(_S)), [_BOXED], lambda u: parse_qs(_parts(u).query, keep_blank_values=True)),
    ("isQuantity", False, _B, [_S], _holds(_quantity)),
    ("quantity", False, _BOXED, [_S], _boxed("quantity", _canonical_quantity)),
    ("sign", True, _I, [_BOXED], lambda q: int(_amount(q).compare(0))),
    ("asInteger", True, _I, [_BOXED], _as_integer),
    ("asApproximateFloat", True, _T.DOUBLE, [_BOXED], lambda q: float(_amount(q))),
    ("compareTo", True, _I, [_BOXED, _BOXED], lambda a, b: int(_amount(a).compare(_amount(b)))),
    ("isLessThan", True, _B, [_BOXED, _BOXED], lambda a, b: _amount(a) < _amount(b)),
    ("isGreaterThan", True, _B, [_BOXED, _BOXED], lambda a, b: _amount(a) > _amount(b)),
    ("add", True, _BOXED, [_BOXED, _BOXED], lambda a, b: _quantity_of(_amount(a) + _amount(b))),
    ("add", True, _BOXED, [_BOXED, _I], lambda a, b: _quantity_of(_amount(a) + _amount(b))),
    ("sub", True, _BOXED, [_BOXED, _BOXED], lambda a, b: _quantity_of(_amount(a) - _amount(b))),
    ("sub", True, _BOXED, [_BOXED, _I], lambda a, b: _quantity_of(_amount(a) - _amount(b))),
    ("isIP", False, _B, [_S], _holds(_ip)),
    ("ip", False, _BOXED, [_S], _boxed("ip", _ip)),
    ("ip", True, _BOXED, [_BOXED], lambda c: {"ip": str(_cidr(c["cidr"]).ip)}),
    ("ip.isCanonical", False, _B, [_S], lambda text: str(_ip(text)) == text),
    ("family", True, _I, [_BOXED], lambda a: _address(a).version),
    ("isCIDR", False, _B, [_S], _holds(_cidr)),
    ("cidr", False, _BOXED, [_S], _boxed("cidr", _cidr)),
    ("containsIP", True, _B, [_BOXED, _BOXED], lambda c, a: _address(a) in _network(c)),
    ("containsIP", True, _B, [_BOXED, _S], lambda c, a: _address(a) in _network(c)),
    ("containsCIDR", True, _B, [_BOXED, _BOXED], _contains_network),
    ("containsCIDR", True, _B, [_BOXED, _S], _contains_network),
    ("prefixLength", True, _I, [_BOXED], lambda c: _network(c).prefixlen),
    ("masked", True, _BOXED, [_BOXED], lambda c: {"cidr": str(_network(c))}),
    *((name.removeprefix("ip."), True, _B, [_BOXED], function) for name, function in _BOOLS.items()),
]


def kubernetes_functions() -> Any:
    """The extension that declares all of them."""
    return cel.CelExtension("kubernetes", list(_declarations()))


def _declarations() -> Iterator[Any]:
    overloads: dict[str, list[Any]] = {}
    for number, (name, is_member, result, arguments, function) in enumerate(_TABLE):
        made = cel.Overload(f"kubernetes_{number}", result, arguments, is_member, function)
        overloads.setdefault(name, []).append(made)
    for name, found in overloads.items():
        yield cel.FunctionDecl(name, found)
