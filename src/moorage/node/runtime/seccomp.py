"""What the kernel refuses to a container that is not privileged, whatever rights it takes: a filter of system calls.

With the standard library only: used by the process whose children containers are.
Owns: the filter, for each kind of machine and each kind of program that it runs.
May not touch: what capabilities keep from a container already.
Start reading at: `install`.

Two things need no right at all, and are not for those who share a machine. Whoever has a loop device open can detach
it: the kernel gives its number to the next volume, and the node in the container is that volume's from then on. And
whoever makes a user namespace has every capability in it, with which control groups and mounts can be made that nobody
here knows of.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple, TypeAlias

from moorage.node.runtime import namespaces


class _Kind(NamedTuple):
    """A kind of programs, and the numbers that system calls have in it."""

    name: int  # AUDIT_ARCH_...
    ioctl: int
    clone: int
    unshare: int


_KINDS = {
    "x86_64": (_Kind(0xC000003E, 16, 56, 272), _Kind(0x40000003, 54, 120, 310)),
    "aarch64": (_Kind(0xC00000B7, 29, 220, 97), _Kind(0x40000028, 54, 120, 337)),
}
_CLONE3 = 435  # of every kind
_X32 = 0x40000000  # a bit in the numbers of a third kind of x86-64, of which hardly any machine has programs
_LOOP, _LOOP_MASK = 0x4C00, 0xFFFFFF00  # the requests of loop devices
_NEW_USER = 0x10000000  # CLONE_NEWUSER

_Instruction: TypeAlias = tuple[int, int, int, int]  # a code, how many to leave out if true and if not, a number
_LOAD, _AND, _IF_EQUAL, _IF_ANY, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
_NUMBER, _NAME, _ARGUMENTS = 0, 4, 16  # where they are in what a filter looks at
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_FORM = struct.Struct("=HBBI")
_PROGRAM = struct.Struct("=H6xQ")  # how many instructions, and where
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4  # the latter: no slower for defences against what it may learn by speculation
_NO_FILTERS = (errno.EINVAL, errno.ENOSYS)


def install(*, may_make_users: bool) -> None:
    """For the process and all that it executes, while it still has CAP_SYS_ADMIN. A kernel without filters, or of a
    machine that none is known for, goes on without."""
    code = filter_for(os.uname().machine, may_make_users=may_make_users)
    if code:
        memory = ctypes.create_string_buffer(code, len(code))
        program = _PROGRAM.pack(len(code) // _FORM.size, ctypes.addressof(memory))
        try:
            namespaces.seccomp(_SET_MODE_FILTER, _SPEC_ALLOW, program)
        except OSError as error:
            if error.errno not in _NO_FILTERS:
                raise


@cache
def filter_for(machine: str, *, may_make_users: bool) -> bytes:
    """The filter as the kernel takes it; empty for a machine that is not known. User namespaces are left to whoever
    may do without them what they are made for."""
    if machine not in _KINDS:
        return b""
    steps: list[_Instruction] = [(_LOAD, 0, 0, _NAME)]
    for kind in _KINDS[machine]:
        rules = [_if_argument(kind.ioctl, 1, _LOOP_MASK, _LOOP)]
        if not may_make_users:
            rules += [_if_argument(number, 0, _NEW_USER, _NEW_USER) for number in (kind.clone, kind.unshare)]
            rules.append([(_IF_EQUAL, 0, 1, _CLONE3), _fail(errno.ENOSYS)])  # its flags cannot be seen; clone is tried
        of_kind = [(_LOAD, 0, 0, _NUMBER), (_IF_ANY, 0, 1, _X32), _fail(errno.ENOSYS), *_joined(rules)]
        steps += [(_IF_EQUAL, 0, len(of_kind) + 1, kind.name), *of_kind, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(_FORM.pack(*one) for one in (*steps, _fail(errno.ENOSYS)))


def _if_argument(number: int, place: int, mask: int, value: int) -> list[_Instruction]:
    """Refuse a call if the bits of `mask` in an argument have this value."""
    return [
        (_IF_EQUAL, 0, 5, number),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * place),  # the lower half: machines are little-endian
        (_AND, 0, 0, mask),
        (_IF_EQUAL, 0, 1, value),
        _fail(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _joined(rules: Iterable[list[_Instruction]]) -> list[_Instruction]:
    return [one for rule in rules for one in rule]


def _fail(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _FAIL | number)
