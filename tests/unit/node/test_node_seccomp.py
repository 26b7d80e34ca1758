"""What the filter of system calls refuses, for machines that need not be this one."""

import errno
import struct

import pytest

from moorage.node.runtime import seccomp

X86_64, I386, AARCH64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028
# For each kind of programs: its machine, and the numbers of ioctl, clone, unshare and socket.
KINDS = {
    X86_64: ("x86_64", 16, 56, 272, 41),
    I386: ("x86_64", 54, 120, 310, 359),
    AARCH64: ("aarch64", 29, 220, 97, 198),
    ARM: ("aarch64", 54, 120, 337, 281),
}
GRANTED = 0
LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE, TCGETS, BLKGETSIZE64 = 0x4C01, 0x4C0A, 0x4C82, 0x5401, 0x80081272
NEW_USER, NEW_MOUNTS, SIGCHLD = 0x10000000, 0x20000, 17
NONE, ADMIN = frozenset(), frozenset({21})


def outcome(machine, kind, number, *arguments, kept=NONE):
    """The error that a call gets, as the kernel runs the filter."""
    seen = struct.pack("=IIQ6Q", number, kind, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", seccomp.filter_for(kept, machine)))
    at = held = 0
    while True:
        what, if_true, if_not, value = code[at]
        at += 1
        match what:
            case 0x20:
                (held,) = struct.unpack_from("=I", seen, value)
            case 0x54:
                held &= value
            case 0x05:
                at += value
            case 0x15:
                at += if_true if held == value else if_not
            case 0x25:
                at += if_true if held > value else if_not
            case 0x35:
                at += if_true if held >= value else if_not
            case 0x06:
                assert value == 0x7FFF0000 or value >> 16 == 5
                return GRANTED if value == 0x7FFF0000 else value & 0xFFFF
            case _:
                raise AssertionError(hex(what))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [NONE, ADMIN])
def test_no_request_reaches_a_loop_device_and_others_reach_theirs(kind, kept):
    machine, ioctl, *_ = KINDS[kind]
    for request in (LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE, 1 << 32 | LOOP_CLR_FD):
        assert outcome(machine, kind, ioctl, 3, request, kept=kept) == errno.EPERM
    for request in (0, TCGETS, BLKGETSIZE64, 0x14C01, 0xFFFFFFFF, 1 << 32 | TCGETS):
        assert outcome(machine, kind, ioctl, 3, request, kept=kept) == GRANTED


@pytest.mark.parametrize("kind", KINDS)
def test_namespaces_are_for_those_who_have_their_capability(kind):
    machine, _, clone, unshare, _ = KINDS[kind]
    for flags in (NEW_USER, NEW_MOUNTS, NEW_USER | NEW_MOUNTS | SIGCHLD):
        for number in (clone, unshare):
            assert outcome(machine, kind, number, flags) == errno.EPERM
            assert outcome(machine, kind, number, flags, kept=ADMIN) == GRANTED
    assert outcome(machine, kind, clone, SIGCHLD) == GRANTED
    assert outcome(machine, kind, clone, SIGCHLD, NEW_USER) == GRANTED  # a stack, not flags
    assert outcome(machine, kind, 435) == errno.ENOSYS  # so that the C library falls back to clone
    assert outcome(machine, kind, 435, kept=ADMIN) == GRANTED


@pytest.mark.parametrize("kind", KINDS)
def test_no_socket_reaches_the_hypervisor(kind):
    machine, *_, socket = KINDS[kind]
    for family in (40, 1 << 32 | 40):
        assert outcome(machine, kind, socket, family) == errno.EPERM
    for family in (0, 1, 2, 10, 41, 0xFFFFFFFF):
        assert outcome(machine, kind, socket, family) == GRANTED


def test_calls_of_kinds_that_are_not_known_are_not_there():
    assert outcome("x86_64", X86_64, 0x40000000 | 514, 3, LOOP_CLR_FD) == errno.ENOSYS  # ioctl of x32
    assert outcome("x86_64", X86_64, 0x40000000, 3) == errno.ENOSYS  # read of x32
    assert outcome("x86_64", AARCH64, 29, 3, LOOP_CLR_FD) == errno.ENOSYS


def test_calls_that_nobody_knows_yet_are_not_there():
    for number in (600, 100_000):
        assert outcome("x86_64", X86_64, number) == errno.ENOSYS


def test_a_personality_changes_nothing_that_protects_the_program():
    for persona in (0, 8, 0x20000, 0xFFFFFFFF):
        assert outcome("x86_64", X86_64, 135, persona) == GRANTED
    assert outcome("x86_64", X86_64, 135, 0x40000) == errno.ENOSYS  # no randomised addresses


def test_a_filter_is_built_once_for_all_that_have_the_same_calls():
    assert seccomp.filter_for(frozenset({0, 1})) is seccomp.filter_for(frozenset({3}))
    assert seccomp.filter_for(frozenset({2})) != seccomp.filter_for(frozenset({3}))


def test_without_the_library_the_reason_names_its_package(monkeypatch):
    monkeypatch.setattr(seccomp, "_LIBRARY", "libnowhere.so.2")
    seccomp._built.cache_clear()
    with pytest.raises(seccomp.Unusable, match="libseccomp2"):
        seccomp.filter_for(NONE)
