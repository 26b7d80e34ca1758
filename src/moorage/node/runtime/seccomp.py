"""The system calls that a container may make, unless it is privileged.

With the standard library only: used by the process whose children containers are. libseccomp builds the filter, because
it knows the numbers of calls on each kind of machine and of program.
Owns: the profile, which is the one that container runtimes use by default, with two rules of ours.
Start reading at: `filter_for`, `install`.

A call that is not in the profile does not exist (ENOSYS), so that C libraries fall back to an older call. One that is
known and refused returns EPERM. Some calls need a capability. The rules of ours: a container that has a loop device
open could detach it, and the kernel gives its number to the next volume; and a user namespace gives a container every
capability, with which it makes control groups and mounts that the agent does not know of.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from moorage.node.runtime import namespaces
from moorage.node.runtime.launch import Unusable

_ALLOWED = """
accept accept4 access adjtimex alarm arch_prctl arm_fadvise64_64 arm_sync_file_range bind breakpoint brk cacheflush
cachestat capget capset chdir chmod chown chown32 clock_adjtime clock_adjtime64 clock_getres clock_getres_time64
clock_gettime clock_gettime64 clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat
dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old
eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark
fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork
fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue
futex_time64 futex_wait futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents
getdents64 getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid
getpgrp getpid getppid getpriority getrandom getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid
getsockname getsockopt gettid gettimeofday getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init
inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit
ioprio_get ioprio_set ipc kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lchown32
lgetxattr link linkat listen listmount listxattr listxattrat llistxattr _llseek lremovexattr lseek lsetxattr lstat
lstat64 madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2
mlockall mmap mmap2 modify_ldt mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64
mq_timedsend mq_timedsend_time64 mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap
name_to_handle_at nanosleep newfstatat _newselect open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2
pkey_alloc pkey_free pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64 process_mrelease
process_vm_readv process_vm_writev pselect6 pselect6_time64 ptrace pwrite64 pwritev pwritev2 read readahead readlink
readlinkat readv recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename
renameat renameat2 restart_syscall riscv_flush_icache riscv_hwprobe rmdir rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo
s390_pci_mmio_read s390_pci_mmio_write s390_runtime_instr sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto set_robust_list set_thread_area
set_tid_address set_tls setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid
setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid
setsockopt setuid setuid32 setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4
sigprocmask sigreturn socketcall socketpair splice stat stat64 statfs statfs64 statmount statx swapcontext symlink
symlinkat sync sync_file_range sync_file_range2 syncfs sysinfo tee tgkill time timer_create timer_delete
timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime
timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask uname unlink
unlinkat uretprobe utime utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev
"""
_REFUSED = """
_sysctl add_key create_module get_kernel_syms io_uring_enter io_uring_register io_uring_setup kexec_file_load kexec_load
keyctl migrate_pages move_pages nfsservctl pivot_root query_module request_key swapoff swapon sysfs uselib userfaultfd
ustat vm86 vm86old
"""
_SYS_ADMIN = 21
_BY_CAPABILITY = {  # capabilities by number, from linux/capability.h
    2: "open_by_handle_at",
    16: "delete_module finit_module init_module",
    17: "ioperm iopl",
    18: "chroot",
    19: "kcmp pidfd_getfd process_madvise",
    20: "acct",
    _SYS_ADMIN: "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr"
    " move_mount open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog umount umount2"
    " unshare",
    22: "reboot",
    23: "get_mempolicy mbind set_mempolicy set_mempolicy_home_node",
    25: "clock_settime clock_settime64 settimeofday stime",
    26: "vhangup",
    34: "syslog",
    38: "perf_event_open",
    39: "bpf",
}
_FLAGS_UNSEEN = {"clone3"}  # a filter cannot read its flags, so it does not exist: C libraries fall back to clone
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_NEW_NAMESPACES = 0x7E020000  # the flags of clone that make namespaces
_LOOP, _LOOP_MASK = 0x4C00, 0xFFFFFF00  # the requests of loop devices
_VSOCK, _WHOLE = 40, 0xFFFFFFFF  # an address family that reaches the hypervisor

# As in linux/audit.h: the programs that a machine runs, its own kind first.
_KINDS = {"x86_64": (0xC000003E, 0x40000003), "aarch64": (0xC00000B7, 0x40000028)}
_LIBRARY = "libseccomp.so.2"
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_EQUAL, _MASKED_EQUAL = 4, 7
_BAD_KIND, _OPTIMIZE, _AS_TREE = 2, 8, 2
_UNKNOWN_NAME = -1
_FORM = struct.Struct("=HBBI")
_PROGRAM = struct.Struct("=H6xQ")  # how many instructions, and where
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4  # the latter: no slower for defences against what it may learn by speculation
_NO_FILTERS = (errno.EINVAL, errno.ENOSYS)


class _Condition(ctypes.Structure):
    """`struct scmp_arg_cmp`: an argument compared with one or two numbers."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class _Rule(NamedTuple):
    action: int
    name: str
    conditions: tuple[_Condition, ...] = ()


def filter_for(kept: frozenset[int], machine: str = "") -> bytes:
    """Return the filter of a container with these capabilities, as the kernel takes it. It is built once for each set
    of them. Raises Unusable if libseccomp is not installed."""
    return _built(kept.intersection(_BY_CAPABILITY), machine or os.uname().machine)


def install(code: bytes) -> None:
    """Filter the calls of this process and all that it executes, while it still has CAP_SYS_ADMIN. A kernel without
    filters goes on without."""
    memory = ctypes.create_string_buffer(code, len(code))
    program = _PROGRAM.pack(len(code) // _FORM.size, ctypes.addressof(memory))
    try:
        namespaces.seccomp(_SET_MODE_FILTER, _SPEC_ALLOW, program)
    except OSError as error:
        if error.errno not in _NO_FILTERS:
            raise


@lru_cache(maxsize=64)
def _built(kept: frozenset[int], machine: str) -> bytes:
    library = _library()
    context = ctypes.c_void_p(library.seccomp_init(_FAIL | errno.ENOSYS))
    try:
        library.seccomp_attr_set(context, _BAD_KIND, _FAIL | errno.ENOSYS)
        library.seccomp_attr_set(context, _OPTIMIZE, _AS_TREE)  # if it can: a search instead of a list
        native = library.seccomp_arch_native()
        kinds = _KINDS.get(machine, (native,))
        for kind in kinds:
            if kind != native:
                _check(library.seccomp_arch_add(context, kind), "add a kind of programs")
        if native not in kinds:
            _check(library.seccomp_arch_remove(context, native), "remove a kind of programs")
        for action, name, conditions in _rules(kept):
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number != _UNKNOWN_NAME:  # to this libseccomp: then it does not exist in containers
                given = (_Condition * len(conditions))(*conditions)
                added = library.seccomp_rule_add_array(context, action, number, len(conditions), given)
                _check(added, f"add a rule for {name}")
        return _exported(library, context)
    finally:
        library.seccomp_release(context)


def _rules(kept: frozenset[int]) -> Iterator[_Rule]:
    granted = {name for one in kept for name in _BY_CAPABILITY[one].split()}
    needing = {name for names in _BY_CAPABILITY.values() for name in names.split()}
    yield from (_Rule(_ALLOW, name) for name in (*_ALLOWED.split(), *sorted(granted)))
    refused = needing - granted - _FLAGS_UNSEEN - {"clone"}
    yield from (_Rule(_FAIL | errno.EPERM, name) for name in (*_REFUSED.split(), *sorted(refused)))
    yield from (_Rule(_ALLOW, "personality", (_Condition(0, _EQUAL, one, 0),)) for one in _PERSONALITIES)
    yield from _unless("ioctl", 1, _LOOP_MASK, _LOOP)
    yield from _unless("socket", 0, _WHOLE, _VSOCK)
    if _SYS_ADMIN not in kept:
        yield _Rule(_ALLOW, "clone", (_Condition(0, _MASKED_EQUAL, _NEW_NAMESPACES, 0),))
        yield from (
            _Rule(_FAIL | errno.EPERM, "clone", (_Condition(0, _MASKED_EQUAL, bit, bit),))
            for bit in _bits(_NEW_NAMESPACES)
        )


def _unless(name: str, argument: int, mask: int, value: int) -> Iterator[_Rule]:
    """Allow a call unless the bits of `mask` in an argument have this value. That is, if any of them has not: a
    comparison of the whole argument would see the upper half, which the kernel ignores."""
    yield _Rule(_FAIL | errno.EPERM, name, (_Condition(argument, _MASKED_EQUAL, mask, value),))
    for bit in _bits(mask):
        yield _Rule(_ALLOW, name, (_Condition(argument, _MASKED_EQUAL, bit, ~value & bit),))


def _bits(mask: int) -> list[int]:
    return [1 << place for place in range(32) if mask >> place & 1]


def _exported(library: ctypes.CDLL, context: ctypes.c_void_p) -> bytes:
    fd = os.memfd_create("filter")
    try:
        _check(library.seccomp_export_bpf(context, fd), "export the filter")
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise Unusable(
            f"cannot filter system calls: {_LIBRARY} is not installed (Debian's package libseccomp2): {error}"
        ) from error
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_arch_native.restype = ctypes.c_uint32
    for change in (library.seccomp_arch_add, library.seccomp_arch_remove):
        change.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
    rule = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    library.seccomp_rule_add_array.argtypes = rule
    library.seccomp_attr_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
    library.seccomp_release.restype = None
    return library


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
