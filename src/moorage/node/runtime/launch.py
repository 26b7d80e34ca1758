"""From a fork to a program: the system calls in between, written down first and then made one after the other.

A `Plan` says everything: the calls, which errors are none, what goes wrong if one fails. Making it takes no decision,
so it can be done by a program without an interpreter (`launch.c`), which is much cheaper than a fork of this one: most
of what such a fork costs is the copying of pages that Python writes to. Where that program was not compiled, a fork
makes the same calls. Whatever they wait for, only the new process does.
With the standard library only.
Owns: the numbers of system calls, the form of a plan in memory, and the process until its program.
May not touch: what a plan is for.
Start reading at: `Plan.do`, `Launcher.launch`.
"""

import array
import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher")  # where setup.py puts it
# For each system call, its number on x86-64 and on machines that came later.
_NUMBERS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "rt_sigaction": (13, 134), "ioctl": (16, 29),
    "execve": (59, 221), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166), "setuid": (105, 146),
    "setgid": (106, 144), "setsid": (112, 157), "setgroups": (116, 159), "capset": (126, 91), "pivot_root": (155, 41),
    "prctl": (157, 167), "mount": (165, 40), "umount2": (166, 39), "sethostname": (170, 161), "exit_group": (231, 94),
    "keyctl": (250, 219), "openat": (257, 56), "mkdirat": (258, 34), "mknodat": (259, 33), "fchownat": (260, 54),
    "unlinkat": (263, 35), "ppoll": (271, 73), "unshare": (272, 97), "dup3": (292, 24), "prlimit64": (302, 261),
    "setns": (308, 268), "seccomp": (317, 277), "open_tree": (428, 428), "move_mount": (429, 429),
    "close_range": (436, 436), "openat2": (437, 437), "mount_setattr": (442, 442),
}  # fmt: skip
_CALL = {name: numbers[os.uname().machine != "x86_64"] for name, numbers in _NUMBERS.items()}
# As in launch.c.
_BASE, _ROOM = 0x2000000000, 1 << 24
_PLAN_FD, _FAIL_FD, _FIRST_FD = 3, 4, 5
_LAST_STREAM, _LAST_FD = 2, 0x7FFFFFFF
_ABOVE_FD = 16
_ACCEPTABLE = 63
_STEP = 12  # numbers: a call, six arguments, and what is said of it
_HEAD = struct.Struct("=qq")  # the address of the steps, and how many there are
_FAILURE = struct.Struct("=ii")  # which step, and the error
_WORD = 8
_CLOSE_AT_EXEC = 4
_MFD_EXEC, _F_SEAL_EXEC = 0x10, 0x20
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes, _syscall.restype = (ctypes.c_long,) * 7, ctypes.c_long


class Unusable(Exception):
    """Something that no process could be started with."""


class Result(NamedTuple):
    """What a step will have given, as an argument of later ones."""

    address: int


Argument: TypeAlias = int | str | bytes | Result


class LaunchFailure(NamedTuple):
    """Why a process did not come to its program."""

    step: int  # -1: not even the first one was made
    text: str


class Plan:
    """System calls for a new process, in which the descriptors of `fds`, and `fail`, have the numbers in `at`."""

    def __init__(self, base: int, fail: int, fds: dict[str, int], at: dict[str, int]) -> None:
        self.fail, self.fds, self.at = fail, fds, at
        self.words: dict[int, str] = {}  # for errors whose usual ones would not tell what is wrong
        self.steps: list[int] = []
        self._texts: list[str] = []
        self._base = base
        self._data = bytearray(_HEAD.size)
        self.do("close_range", _PLAN_FD, _LAST_FD, _CLOSE_AT_EXEC, text="keep files from the program")

    def __len__(self) -> int:
        return len(self._texts)

    def do(self, call: str, *arguments: Argument, text: str, accept: int = 0, skip: int = 0, expect: int = -1) -> None:
        """One call. If it fails, `text` is what could not be done; after one of the `errors` to `accept` the plan goes
        on, without the next `skip` steps. It must give what to `expect`, if that is said."""
        self._add(call, arguments, text, accept, skip, expect, 0)

    def get(self, call: str, *arguments: Argument, text: str) -> Result:
        """One call whose result later ones need."""
        slot = self.data(bytes(_WORD))
        self._add(call, arguments, text, 0, 0, -1, slot)
        return Result(slot)

    def keep_only(self, *names: str) -> None:
        """Close all files but the streams, `fail`, and those of these names."""
        kept = sorted(self.at[name] for name in ("fail", *names))
        for below, above in pairwise((_LAST_STREAM, *kept, _LAST_FD + 1)):
            if below + 1 < above:
                self.do("close_range", below + 1, above - 1, 0, text="close files")

    def do_all(self, calls: "Calls") -> None:
        """Calls that are the same in every plan."""
        self.steps += calls.steps
        self._texts += calls.texts

    def data(self, content: bytes) -> int:
        """The address at which the new process finds it."""
        self._data += bytes(-len(self._data) % _WORD)
        return self._put(content)

    def text(self, text: str | bytes) -> int:
        """The address of a text, as the kernel takes it."""
        content = os.fsencode(text)
        if 0 in content:
            raise Unusable(f"a zero byte is in {text!r}")
        return self._put(content + b"\0")

    def vector(self, texts: Iterable[str]) -> int:
        """The address of addresses of texts, as a program takes its arguments."""
        addresses = [self.text(text) for text in texts]
        return self.data(struct.pack(f"={len(addresses)}QQ", *addresses, 0))

    def image(self) -> bytes:
        """The whole, as it lies in memory."""
        steps = self.data(array.array("q", self.steps).tobytes())
        _HEAD.pack_into(self._data, 0, steps, len(self))
        return bytes(self._data)

    def failure(self, told: bytes) -> LaunchFailure:
        """From what the new process has written."""
        step, number = _FAILURE.unpack(told[: _FAILURE.size])
        if step < 0:
            return LaunchFailure(step, "the process that becomes the program could not read what to do")
        reason = f": {self.words.get(number) or os.strerror(number)}" if number else ""
        return LaunchFailure(step, f"{self._texts[step]}{reason}")

    def _put(self, content: bytes) -> int:
        address = self._base + len(self._data)
        self._data += content
        self._keep_within(len(self._data))
        return address

    def _keep_within(self, size: int) -> None:
        """Asked while a plan is made: who wants too much must not be given the memory first."""
        if size > _ROOM:
            raise Unusable(f"paths, arguments and environment take more than the {_ROOM} bytes that are possible")

    def _add(
        self,
        call: str,
        arguments: tuple[Argument, ...],
        text: str,
        accept: int,
        skip: int,
        expect: int,
        slot: int,
    ) -> None:
        step = [_CALL[call], 0, 0, 0, 0, 0, 0, 0, accept, skip, expect, slot]
        for place, argument in enumerate(arguments, 1):
            if isinstance(argument, Result):
                step[7] |= 1 << (place - 1)
                step[place] = argument.address
            elif isinstance(argument, int):
                step[place] = argument
            else:
                step[place] = self.text(argument)
        self.steps += step
        self._texts.append(text)
        self._keep_within(len(self._data) + _WORD * len(self.steps))


class Calls(NamedTuple):
    """Steps with nothing but numbers in them, made once."""

    steps: list[int]
    texts: list[str]

    @classmethod
    def of(cls, call: str, every: Iterable[tuple[int, ...]], text: str, accept: int = 0) -> "Calls":
        """The same call with other arguments each time."""
        steps: list[int] = []
        texts: list[str] = []
        for one in every:
            steps += [_CALL[call], *one, *(0 for _ in range(6 - len(one))), 0, accept, 0, -1, 0]
            texts.append(text)
        return cls(steps, texts)


class Launcher:
    """Starts processes that do as planned: with the program, where it was compiled and runs; else by forking. What is
    executed is a copy of the program that nobody can write to: a container can open whatever has entered it."""

    def __init__(self, program: str = PROGRAM) -> None:
        self._program = _sealed(program)
        self._memory = mmap.mmap(-1, _ROOM, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if not self._runs():
            self._program = ""

    @property
    def is_compiled(self) -> bool:
        return bool(self._program)

    def plan(self, fail: int, **fds: int) -> Plan:
        """An empty one for a process that has these descriptors, and tells `fail` when it fails. Once its program runs,
        `fail` is closed there."""
        if not self._program:
            return Plan(self._address, fail, fds, {"fail": fail, **fds})
        return Plan(_BASE, fail, fds, {name: number for number, name in enumerate(("fail", *fds), _FAIL_FD)})

    def launch(self, plan: Plan) -> int:
        """The number of a new process."""
        return self._spawn(plan) if self._program else self._fork(plan)

    def _spawn(self, plan: Plan) -> int:
        image = plan.image()
        opened = [os.memfd_create("plan")]
        try:
            if os.write(opened[0], image) != len(image):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            actions = []
            for number, fd in enumerate((opened[0], plan.fail, *plan.fds.values()), _PLAN_FD):
                high = fd  # where none of the others is put
                if fd < _ABOVE_FD:
                    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE_FD)
                    opened.append(high)
                actions.append((os.POSIX_SPAWN_DUP2, high, number))
            return os.posix_spawn(self._program, [self._program], {}, file_actions=actions)
        finally:
            for fd in opened:
                os.close(fd)

    def _fork(self, plan: Plan) -> int:
        image = plan.image()
        self._memory[: len(image)] = image
        pid = os.fork()
        if pid == 0:
            try:
                os.write(plan.fail, _FAILURE.pack(*_make(plan.steps)))
            finally:
                os._exit(127)
        return pid

    def _runs(self) -> bool:
        if not self._program:
            return False
        with open(os.devnull, "wb") as nobody:
            plan = self.plan(nobody.fileno())
            plan.do("exit_group", 0, text="try")
            try:
                return os.waitpid(self.launch(plan), 0)[1] == 0
            except OSError:  # made for another machine
                return False


def _sealed(program: str) -> str:
    """Where a copy of a program can be executed, by this process and its children; nowhere, if there is none."""
    if not program or not os.access(program, os.X_OK):
        return ""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd, seals = os.memfd_create("launcher", flags | _MFD_EXEC), _SEALS | _F_SEAL_EXEC
    except OSError:  # a kernel that does not know of it has no need of it
        fd, seals = os.memfd_create("launcher", flags), _SEALS
    with open(program, "rb") as file, open(fd, "wb") as copy:
        copy.write(file.read())
        copy.flush()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with open(f"/proc/self/fd/{fd}", "rb") as sealed:  # what is open for writing is not executed
            return f"/proc/self/fd/{fcntl.fcntl(sealed.fileno(), fcntl.F_DUPFD_CLOEXEC, _ABOVE_FD)}"


def errors(*numbers: int) -> int:
    """A set of errors that are none."""
    return sum(1 << number for number in numbers)


ANY = errors(*range(1, _ACCEPTABLE))


def _make(steps: list[int]) -> tuple[int, int]:
    """In the new process: what `launch.c` does. Returns which step has failed, and its error."""
    at = 0
    while at < len(steps):
        number, *given, indirect, accepted, skip, expect, slot = steps[at : at + _STEP]
        if indirect:
            given = [_at(one).value if indirect >> place & 1 else one for place, one in enumerate(given)]
        result = _syscall(number, *given)
        if result == -1:
            error = ctypes.get_errno()
            if error > _ACCEPTABLE or not accepted >> error & 1:
                return at // _STEP, error
            at += skip * _STEP
        elif expect not in (-1, result):
            return at // _STEP, 0
        elif slot:
            _at(slot).value = result
        at += _STEP
    return -1, 0


def _at(address: int) -> ctypes.c_long:
    return ctypes.c_long.from_address(address)
