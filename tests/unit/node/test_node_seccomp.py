"""What the filter of system calls refuses, for machines that need not be this one."""

import errno
import struct

import pytest

from moorage.node.runtime import seccomp

X86_64, I386, AARCH64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028
# For each kind of programs: its machine, and the numbers of ioctl, clone and unshare.
KINDS = {
    X86_64: ("x86_64", 16, 56, 272),
    I386: ("x86_64", 54, 120, 310),
    AARCH64: ("aarch64", 29, 220, 97),
    ARM: ("aarch64", 54, 120, 337),
}
GRANTED = 0
LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE, TCGETS, BLKGETSIZE64 = 0x4C01, 0x4C0A, 0x4C82, 0x5401, 0x80081272
NEW_USER, NEW_MOUNTS, SIGCHLD = 0x10000000, 0x20000, 17


def outcome(machine, kind, number, *arguments, may_make_users=False):
    """The error that a call gets, as the kernel runs the filter."""
    seen = struct.pack("=IIQ6Q", number, kind, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", seccomp.filter_for(machine, may_make_users=may_make_users)))
    at = held = 0
    while True:
        what, if_true, if_not, value = code[at]
        at += 1
        match what:
            case 0x20:
                (held,) = struct.unpack_from("=I", seen, value)
            case 0x54:
                held &= value
            case 0x15:
                at += if_true if held == value else if_not
            case 0x45:
                at += if_true if held & value else if_not
            case 0x06:
                assert value == 0x7FFF0000 or value >> 16 == 5
                return GRANTED if value == 0x7FFF0000 else value & 0xFFFF


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("may_make_users", [False, True])
def test_no_request_reaches_a_loop_device_and_others_reach_theirs(kind, may_make_users):
    machine, ioctl, *_ = KINDS[kind]
    for request in (LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE, 1 << 32 | LOOP_CLR_FD):
        assert outcome(machine, kind, ioctl, 3, request, may_make_users=may_make_users) == errno.EPERM
    for request in (TCGETS, BLKGETSIZE64, 0x14C01):
        assert outcome(machine, kind, ioctl, 3, request, may_make_users=may_make_users) == GRANTED
    assert outcome(machine, kind, ioctl + 1, 3, LOOP_CLR_FD, may_make_users=may_make_users) == GRANTED


@pytest.mark.parametrize("kind", KINDS)
def test_user_namespaces_are_for_those_who_need_none(kind):
    machine, _, clone, unshare = KINDS[kind]
    for number in (clone, unshare):
        for flags in (NEW_USER, NEW_USER | NEW_MOUNTS | SIGCHLD):
            assert outcome(machine, kind, number, flags) == errno.EPERM
            assert outcome(machine, kind, number, flags, may_make_users=True) == GRANTED
        assert outcome(machine, kind, number, NEW_MOUNTS | SIGCHLD) == GRANTED
        assert outcome(machine, kind, number, SIGCHLD, NEW_USER) == GRANTED  # a stack, not flags
    assert outcome(machine, kind, 435) == errno.ENOSYS  # so that the C library falls back to clone
    assert outcome(machine, kind, 435, may_make_users=True) == GRANTED


def test_calls_of_kinds_that_are_not_known_are_not_there():
    assert outcome("x86_64", X86_64, 0x40000000 | 514, 3, LOOP_CLR_FD) == errno.ENOSYS  # ioctl of x32
    assert outcome("x86_64", AARCH64, 29, 3, LOOP_CLR_FD) == errno.ENOSYS


def test_a_machine_that_is_not_known_has_no_filter():
    assert seccomp.filter_for("riscv64", may_make_users=False) == b""
