"""The other end of a connection, as the kernel shows it.

Owns: the rows of `/proc/net/tcp`, which processes hold a socket, and whether a client has closed.
May not touch: what is concluded from it.
Start reading at: `roots_outside_of_pods`, `is_closed`.
"""

import functools
import ipaddress
import os
import select
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

End = tuple[Any, ...]  # an address and a port
Ends = tuple[End | None, End | None]
SocketTable = dict[tuple[str, str], list[list[str]]]  # both ends, as they are written there, to rows

_ESTABLISHED = 1
_TABLES = {4: ("/proc/net/tcp", "/proc/net/tcp6"), 6: ("/proc/net/tcp6",)}  # a socket for both may speak IPv4


class Transport(Protocol):
    """What has a socket to be asked about."""

    def get_extra_info(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class SocketRow:
    """One end of a connection on this machine. The kernel gives uid 0 and inode 0 once its process has closed it."""

    state: int
    uid: int
    inode: int


def ends_of(transport: Transport) -> Ends:
    """The client's address and port, and ours."""
    return transport.get_extra_info("peername"), transport.get_extra_info("sockname")


def roots_outside_of_pods(connections: Sequence[Ends]) -> list[bool]:
    """Whether root of this machine holds the other end of each loopback connection, and no process in a
    container, where root is another. No when in doubt. Looks through all processes, once for all connections: not for
    the event loop."""
    table_at = functools.cache(_table_at)
    inodes = [_inode_of_root(peer, own, table_at) for peer, own in connections]
    holders = holders_of(set(inodes) - {0})
    return [_are_outside_of_pods(holders.get(inode, ())) for inode in inodes]


def _inode_of_root(peer: End | None, own: End | None, table_at: Callable[[str], SocketTable]) -> int:
    """Of the socket at the other end, if that is open and root has made it; else 0."""
    if not peer or not own or not _address(peer).is_loopback:
        return 0
    rows = rows_between(peer, own, table_at)
    if len(rows) != 1 or rows[0].state != _ESTABLISHED or rows[0].uid != 0:
        return 0
    return rows[0].inode


def _are_outside_of_pods(pids: Iterable[int]) -> bool:
    ours = os.readlink("/proc/self/ns/mnt")
    namespaces = [one for one in map(_mount_namespace_of, pids) if one is not None]
    return bool(namespaces) and all(one == ours for one in namespaces)


def is_closed(transport: Transport) -> bool:
    """Whether the client has closed the connection, also if nothing is read from it at the moment. A close waits behind
    data that is never read; that of a client on this machine shows at its own end nevertheless."""
    socket, peer, own = (transport.get_extra_info(name) for name in ("socket", "peername", "sockname"))
    if socket is None or socket.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(socket.fileno(), select.POLLRDHUP)  # errors are told unasked
    if poll.poll(0):
        return True
    is_local = peer[0] == own[0] or _address(peer).is_loopback
    return is_local and any(row.state != _ESTABLISHED for row in rows_between(peer, own))


def _table_at(path: str) -> SocketTable:
    table: SocketTable = {}
    try:
        with open(path, encoding="ascii") as lines:  # some ms: the kernel looks through all it has room for
            for row in map(str.split, lines):
                table.setdefault((row[1], row[2]), []).append(row)
    except FileNotFoundError:  # without IPv6
        pass
    return table


def rows_between(local: End, remote: End, table_at: Callable[[str], SocketTable] = _table_at) -> list[SocketRow]:
    """The ends on this machine with these addresses and ports."""
    pairs = [(one, other) for one in _spellings(local) for other in _spellings(remote)]
    for path in _TABLES[_address(local).version]:
        table = table_at(path)
        rows = [row for pair in pairs for row in table.get(pair, ())]
        if rows:
            return [SocketRow(int(row[3], 16), int(row[7]), int(row[9])) for row in rows]
    return []


def holders_of(inodes: Set[int]) -> dict[int, set[int]]:
    """The processes that have these sockets open."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, set[int]] = {}
    for name in os.listdir("/proc") if wanted else ():
        if name.isdigit():
            for link in _links_in(f"/proc/{name}/fd") & wanted.keys():
                found.setdefault(wanted[link], set()).add(int(name))
    return found


def _links_in(directory: str) -> set[str]:
    try:
        names = os.listdir(directory)
    except OSError:  # gone, or not to be seen by us
        return set()
    links = set()
    for name in names:
        try:
            links.add(os.readlink(f"{directory}/{name}"))
        except OSError:  # closed since
            continue
    return links


def _mount_namespace_of(pid: int) -> str | None:
    """None when the process is gone, and so holds nothing any more."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return ""


def _address(end: End) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(end[0])
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _spellings(end: End) -> set[str]:
    """An address and port as the tables have them; IPv4 is written as IPv6 if the socket is one for both."""
    packed = [_address(end).packed]
    if len(packed[0]) == 4:
        packed.append(b"\0" * 10 + b"\xff\xff" + packed[0])
    return {f"{_words(one)}:{end[1]:04X}" for one in packed}


def _words(packed: bytes) -> str:
    return b"".join(packed[start : start + 4][::-1] for start in range(0, len(packed), 4)).hex().upper()
