"""Take from unpacked Debian packages what a running image needs: a few programs, Python, and the libraries they load.

Owns: the list of programs, and finding the libraries that they and the Python packages already in the folder load.
Usage: choose.py DEBIAN.tar ROOT
"""

import shutil
import struct
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

# What the plugin runs, and what a person needs who looks at a volume's filesystem from inside the container.
PROGRAMS = (
    *("python3", "python3.*", "sh", "dash", "mount", "umount", "losetup", "blkid"),
    *("mkfs.ext4", "mke2fs", "e2fsck", "resize2fs", "tune2fs", "dumpe2fs"),
    *("mkfs.xfs", "xfs_growfs", "xfs_repair", "xfs_db", "mkfs.btrfs", "btrfs", "btrfstune"),
)
FILES = ("etc/mke2fs.conf", "usr/share/doc/*/copyright", "usr/share/doc/*")
# Parts of the standard library that no server imports: documentation, editors, installers, its own tests.
_NOT_PYTHON = ("pydoc_data", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "distutils", "test")
_NOT_EXTENSIONS = ("_curses", "_dbm", "_test", "_tkinter", "nis", "ossaudiodev", "readline", "xxlimited")
_FOLDERS = ("dev", "etc", "home", "media", "mnt", "opt", "proc", "root", "run", "sys", "tmp", "var/lib", "var/log")
_MERGED = ("bin", "sbin", "lib", "lib64")
_USERS = {"root": 0, "moorage": 65532, "nobody": 65534}


def main() -> None:
    archive, root = Path(sys.argv[1]), Path(sys.argv[2])
    full = root.with_name("full")
    unpack(archive, full)
    python = f"python3.{sys.version_info.minor}"
    if not (full / "usr/lib" / python).is_dir():
        sys.exit(
            f"image: this suite has no {python}, with which the environment was made; see deploy/image/Containerfile"
        )
    for name in chosen(full):
        copy(full, root, name)
    furnish(root)
    for name in sorted(libraries(full, root)):
        copy(full, root, name)
    write_status(full / "packages", root)
    shutil.rmtree(full)


def unpack(archive: Path, target: Path) -> None:
    """Unpack with /bin, /sbin and /lib inside /usr, where links to them point."""
    for name in _MERGED:
        (target / "usr" / name).mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to(f"usr/{name}")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)  # Python before 3.11.4 has none
        for member in tar:
            name = member.name.removeprefix("./").removeprefix("/")
            if member.isdev() or not name or name in _MERGED:
                continue
            member.name = f"usr/{name}" if name.split("/")[0] in _MERGED else name
            if member.islnk():
                linked = member.linkname.removeprefix("./").removeprefix("/")
                member.linkname = f"usr/{linked}" if linked.split("/")[0] in _MERGED else linked
            tar.extract(member, target)


def chosen(full: Path) -> Iterator[str]:
    """Programs, Python and the files named above, relative to the root."""
    for folder in ("usr/bin", "usr/sbin"):
        for pattern in PROGRAMS:
            yield from (str(path.relative_to(full)) for path in sorted((full / folder).glob(pattern)))
    for pattern in FILES:
        yield from (str(p.relative_to(full)) for p in sorted(full.glob(pattern)) if p.is_file() or p.is_symlink())
    for path in sorted((full / "usr/lib").glob("python3.*/**/*")):
        if _is_wanted(path.relative_to(full / "usr/lib").parts[1:]) and (path.is_file() or path.is_symlink()):
            yield str(path.relative_to(full))


def _is_wanted(parts: tuple[str, ...]) -> bool:
    if parts[0] in _NOT_PYTHON or parts[0].startswith("config-") or "__pycache__" in parts:
        return False
    return parts[0] != "lib-dynload" or not parts[-1].startswith(_NOT_EXTENSIONS)


def libraries(full: Path, root: Path) -> set[str]:
    """Every shared library that something in `root` loads, and what those load, with the links that lead to them."""
    folders = [*sorted((full / "usr/lib").glob("*-linux-gnu*")), full / "usr/lib", full / "usr/lib64"]
    found: set[str] = set()
    waiting = [name for path in sorted(root.rglob("*")) if path.is_file() for name in needed_by(path)]
    waiting.append("libgcc_s.so.1")  # loaded by name when a thread is cancelled
    while waiting:
        name = waiting.pop()
        for folder in folders:
            path = folder / name
            relative = str(path.relative_to(full))
            if path.exists() and relative not in found:
                found.add(relative)
                waiting += needed_by(path.resolve())
    return found


def needed_by(path: Path) -> list[str]:
    """The libraries and the interpreter that an ELF file asks for; nothing for other files."""
    with path.open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":  # 64 bits, little endian
            return []
        data = memoryview(b"\x7fELF\x02\x01" + file.read())
    offset, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    segments = [struct.unpack_from("<IIQQQQ", data, offset + 56 * at) for at in range(count)]
    names, wanted, strings = [], [], 0
    for kind, _, start, _, _, size in segments:
        if kind == 3:  # PT_INTERP
            names.append(Path(bytes(data[start : start + size]).rstrip(b"\0").decode()).name)
        if kind == 2:  # PT_DYNAMIC
            for tag, value in struct.iter_unpack("<qQ", data[start : start + size // 16 * 16]):
                if tag == 1:  # DT_NEEDED
                    wanted.append(value)
                elif tag == 5:  # DT_STRTAB
                    strings = value
    base = _file_offset(segments, strings)
    return names + [_text(data, base + at) for at in wanted]


def _file_offset(segments: list[tuple[int, ...]], address: int) -> int:
    for kind, _, start, virtual, _, size in segments:
        if kind == 1 and virtual <= address < virtual + size:  # PT_LOAD
            return start + address - virtual
    return address


def _text(data: memoryview, at: int) -> str:
    return bytes(data[at : at + 256]).split(b"\0", 1)[0].decode()


def copy(full: Path, root: Path, name: str) -> None:
    """One file, or a link and what it leads to."""
    source, target = full / name, root / name
    if target.exists() or target.is_symlink():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_symlink():
        if source.is_file():
            shutil.copy(source, target)
        return
    target.symlink_to(source.readlink())
    pointed = Path(full, str(source.readlink()).lstrip("/")) if source.readlink().is_absolute() else source.resolve()
    if pointed.is_file():
        copy(full, root, str(pointed.resolve().relative_to(full.resolve())))


def furnish(root: Path) -> None:
    """The folders that mounts need, and names for the users that processes run as."""
    for folder in _FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in _MERGED:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("".join(f"{n}:x:{i}:{i}:{n}:/:/usr/bin/sh\n" for n, i in _USERS.items()))
    (root / "etc/group").write_text("".join(f"{n}:x:{i}:\n" for n, i in _USERS.items()))
    (root / "etc/mtab").symlink_to("/proc/self/mounts")


def write_status(packages: Path, root: Path) -> None:
    """Which Debian packages the files come from, in the form that scanners for known vulnerabilities read."""
    stanzas = sorted(stanza.strip() for stanza in packages.read_text().split("\n\n") if stanza.strip())
    target = root / "var/lib/dpkg/status"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        "".join(stanza.replace("\n", "\nStatus: install ok installed\n", 1) + "\n\n" for stanza in stanzas)
    )


if __name__ == "__main__":
    main()
