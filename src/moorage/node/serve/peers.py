"""The other end of a connection, as the kernel shows it.

Owns: the rows of `/proc/net/tcp`, which processes hold a socket, and whether a client has closed.
May not touch: what is concluded from it.
Start reading at: `is_root_outside_of_pods`, `is_closed`.
"""

import ipaddress
import os
import select
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

_ESTABLISHED = 1
_TABLES = {4: ("/proc/net/tcp", "/proc/net/tcp6"), 6: ("/proc/net/tcp6",)}  # a socket for both may speak IPv4


class Transport(Protocol):
    """What has a socket to be asked about."""

    def get_extra_info(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One end of a connection on this machine. The kernel gives uid 0 and inode 0 once its process has closed it."""

    state: int
    uid: int
    inode: int


def is_root_outside_of_pods(transport: Transport) -> bool:
    """Whether the other end of a loopback connection is in the hands of root of this machine, and of nobody in a
    container, where root is another. No when in doubt. Looks through all processes: not for the event loop."""
    peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    if not peer or not own or not _address(peer).is_loopback:
        return False
    rows = rows_between(peer, own)
    if len(rows) != 1 or rows[0].state != _ESTABLISHED or rows[0].uid != 0 or rows[0].inode == 0:
        return False
    ours = os.readlink("/proc/self/ns/mnt")
    namespaces = [_mount_namespace_of(pid) for pid in holders_of(rows[0].inode)]
    held = [one for one in namespaces if one is not None]
    return bool(held) and all(one == ours for one in held)


def is_closed(transport: Transport) -> bool:
    """Whether the client has closed the connection, also if nothing is read from it at the moment. A close waits behind
    data that nobody takes; that of a client on this machine shows at its own end nevertheless."""
    socket, peer, own = (transport.get_extra_info(name) for name in ("socket", "peername", "sockname"))
    if socket is None or socket.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(socket.fileno(), select.POLLRDHUP)  # errors are told unasked
    if poll.poll(0):
        return True
    is_local = peer[0] == own[0] or _address(peer).is_loopback
    return is_local and any(row.state != _ESTABLISHED for row in rows_between(peer, own))


def rows_between(local: tuple[Any, ...], remote: tuple[Any, ...]) -> list[Row]:
    """The ends on this machine with these addresses and ports."""
    one, other = _spellings(local), _spellings(remote)
    for table in _TABLES[_address(local).version]:
        try:
            with open(table, encoding="ascii") as lines:  # some ms: the kernel looks through all it has room for
                rows = [row for row in map(str.split, lines) if row[1] in one and row[2] in other]
        except FileNotFoundError:  # without IPv6
            continue
        if rows:
            return [Row(int(row[3], 16), int(row[7]), int(row[9])) for row in rows]
    return []


def holders_of(inode: int) -> Iterator[int]:
    """The processes that have this socket open."""
    wanted = f"socket:[{inode}]"
    for name in os.listdir("/proc"):
        if name.isdigit() and _holds(f"/proc/{name}/fd", wanted):
            yield int(name)


def _holds(directory: str, wanted: str) -> bool:
    try:
        names = os.listdir(directory)
    except OSError:  # gone, or not to be seen by us
        return False
    for name in names:
        try:
            if os.readlink(f"{directory}/{name}") == wanted:
                return True
        except OSError:  # closed since
            continue
    return False


def _mount_namespace_of(pid: int) -> str | None:
    """None when the process is gone, and so holds nothing any more."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return ""


def _address(end: tuple[Any, ...]) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(end[0])
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _spellings(end: tuple[Any, ...]) -> set[str]:
    """An address and port as the tables have them; IPv4 is written as IPv6 if the socket is one for both."""
    packed = [_address(end).packed]
    if len(packed[0]) == 4:
        packed.append(b"\0" * 10 + b"\xff\xff" + packed[0])
    return {f"{_words(one)}:{end[1]:04X}" for one in packed}


def _words(packed: bytes) -> str:
    return b"".join(packed[start : start + 4][::-1] for start in range(0, len(packed), 4)).hex().upper()
