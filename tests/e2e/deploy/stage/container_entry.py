"""Become one container, as a runtime would start it: root, mounts, network and powers of its own; then the program.

Run as a program with one JSON argument. A mount with "propagation": "Bidirectional" stays a peer of the host's, as
Kubernetes promises; everything else is private to this process. Of the host's network only the API server's port can be
reached, and only where `relay_port` asks for it.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWIPC = 0x00020000, 0x40000000, 0x08000000
RDONLY, NOSUID, REMOUNT, BIND, MOVE, REC, PRIVATE, SLAVE = 1, 2, 32, 4096, 8192, 16384, 1 << 18, 1 << 19
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG = 24, 38, 1
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "SETFCAP": 31}


def main() -> None:
    spec = json.loads(sys.argv[1])
    checked(LIBC.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "die with the test")
    outside = start_relay(spec["relay_port"]) if spec["relay_port"] else None
    checked(LIBC.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if outside is not None:
        hand_listener(outside, spec["relay_port"])
    make_private([m["source"] for m in spec["mounts"] if m["propagation"] == "Bidirectional"])
    root = spec["root"]
    mount("overlay", root, "overlay", 0, f"lowerdir={spec['image']},upperdir={spec['upper']},workdir={spec['work']}")
    kernel_filesystems(root, is_privileged=spec["privileged"])
    for each in spec["mounts"]:
        bind(each["source"], root + each["target"], read_only=each["read_only"])
    if spec["read_only_root"]:
        mount("", root, "", REMOUNT | BIND | RDONLY)
    pivot(root)
    become(spec)
    os.execve(spec["argv"][0], spec["argv"], spec["env"])


def start_relay(port: int) -> socket.socket:
    """A child in the host's network, which connects who comes to the listener that it is handed with `port` here."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    _, descriptors, _, _ = socket.recv_fds(theirs, 1, 1)
    if descriptors:
        asyncio.run(relay(socket.socket(fileno=descriptors[0]), port, theirs))
    os._exit(0)


def hand_listener(outside: socket.socket, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        socket.send_fds(outside, [b"x"], [listener.fileno()])
    outside.set_inheritable(True)  # the program holds it, so the relay learns when it ends
    outside.detach()


async def relay(listener: socket.socket, port: int, container: socket.socket) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, requests), pump(answers, writer))

    await asyncio.start_server(connected, sock=listener)
    container.setblocking(False)
    await asyncio.get_running_loop().sock_recv(container, 1)  # nothing comes but the end


def make_private(shared: list[str]) -> None:
    """Every mount but the shared ones and what is below them."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target = line.split()[4].encode().decode("unicode_escape")
        if not any(target == path or target.startswith(path + "/") for path in shared):
            mount("", target, "", PRIVATE)


def kernel_filesystems(root: str, *, is_privileged: bool) -> None:
    for name in ("proc", "sys", "dev"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    mount("proc", f"{root}/proc", "proc", NOSUID)
    mount("/sys", f"{root}/sys", "", BIND | REC)
    if not is_privileged:
        mount("", f"{root}/sys", "", REMOUNT | BIND | RDONLY)
    mount("tmpfs", f"{root}/dev", "tmpfs", NOSUID, "mode=755")
    for name in ("null", "zero", "full", "random", "urandom"):
        Path(f"{root}/dev/{name}").touch()
        mount(f"/dev/{name}", f"{root}/dev/{name}", "", BIND)


def bind(source: str, target: str, *, read_only: bool) -> None:
    os.makedirs(target, exist_ok=True)
    mount(source, target, "", BIND | REC)
    if read_only:
        mount("", target, "", REMOUNT | BIND | RDONLY)


def pivot(root: str) -> None:
    """Leave the host's root behind for good, so that no path of it can be seen or reached."""
    old = os.open("/", os.O_PATH | os.O_DIRECTORY)
    os.chdir(root)
    checked(LIBC.syscall(PIVOT_ROOT, b".", b"."), "pivot_root")
    os.fchdir(old)
    mount("", ".", "", SLAVE | REC)  # or the host would lose the shared mounts that go with it
    checked(LIBC.umount2(b".", 2), "detach the old root")
    os.close(old)
    os.chdir("/")


def become(spec: dict) -> None:
    if not spec["privileged"]:
        kept = {CAPABILITIES[name] for name in spec["capabilities"]}
        for number in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
            if number not in kept:
                checked(LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0), "drop a capability")
    os.setgroups([])
    os.setresgid(spec["group"], spec["group"], spec["group"])
    os.setresuid(spec["user"], spec["user"], spec["user"])
    if spec["no_new_privileges"]:
        checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    encoded = [text.encode() for text in (source, target, kind)]
    checked(LIBC.mount(*encoded, flags, data.encode() or None), f"mount {source} at {target}")


def checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
