"""`moorage volume`: work with the volumes of a pool, without any cluster."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from moorage import log
from moorage.cli import show
from moorage.cli.show import Output
from moorage.errors import MoorageError, UsageError
from moorage.host.errors import host_error
from moorage.kube.quantity import bytes_of
from moorage.storage import CreateSnapshot, CreateVolume, InUse, Pool, Snapshot, Source, Volume, VolumeKind
from moorage.storage.guests import (
    open_pool,
    snapshot_for_export,
    snapshot_named,
    source_named,
    volume_named,
)

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A volume, by name or id.")]
SnapshotName = Annotated[str, typer.Argument(help="A snapshot, by name or id.")]


@dataclass(frozen=True, slots=True)
class Place:
    """The pool that the commands work on."""

    directory: Path

    def open(self, make: bool = False) -> Pool:
        return open_pool(self.directory, make=make)


@app.callback()
def volume(
    ctx: typer.Context,
    pool: Annotated[str, typer.Option(help="Directory of the pool.", envvar="MOORAGE_POOL", metavar="DIRECTORY")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the pool logs.")] = False,
) -> None:
    """Work with the volumes of a pool, without any cluster; safe beside a running plugin.

    Example: moorage volume --pool /var/lib/moorage/pool list
    """
    log.configure("info" if verbose else "warning")
    ctx.obj = Place(Path(pool))


def _bytes(option: str, text: str) -> int:
    """A size such as 10Gi; nothing is 0, which leaves it to the pool."""
    found = bytes_of(text)
    if text and found <= 0:
        raise UsageError(f"{option} {text!r}: a size must be more than nothing")
    return found


def _choice(option: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise UsageError(f"{option} {text!r}: want {', '.join(allowed)}")
    return text


def _told(volume: Volume, output: str, sentence: str) -> None:
    if show.check_output(output):
        show.json_out(volume)
    else:
        show.say(sentence)


# --- making and showing --------------------------------------------------------------------


@app.command()
def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A name; the id is made from it.")],
    size: Annotated[str, typer.Option(help="Size, such as 10Gi.")] = "1Gi",
    kind: Annotated[str, typer.Option(help="image or directory.")] = "image",
    filesystem: Annotated[str, typer.Option(help="ext4, xfs, btrfs, or block for a raw device.")] = "ext4",
    thick: Annotated[bool, typer.Option(help="Take all the space now.")] = False,
    new_pool: Annotated[bool, typer.Option("--new-pool", help="Make the pool if the directory is empty.")] = False,
    output: Output = "text",
) -> None:
    """Make a volume; the same call again changes nothing."""
    show.check_output(output)
    _choice("--kind", kind, ("image", "directory"))
    _choice("--filesystem", filesystem, ("ext4", "xfs", "btrfs", "block"))
    request = CreateVolume(
        name,
        required_bytes=_bytes("--size", size),
        kind=VolumeKind(kind),
        filesystem="" if filesystem == "block" or kind == "directory" else filesystem,
        thick=thick,
    )
    with ctx.obj.open(make=new_pool) as pool, show.progress_bar(f"create {name}") as progress:
        made = pool.create_volume(request, progress)
    _told(made, output, f"volume {made.id} of {show.size(made.size_bytes)}")


@app.command(name="list")
def list_volumes(ctx: typer.Context, output: Output = "text") -> None:
    """List all volumes: what they were promised, what they use, what they share with snapshots."""
    from moorage.storage.listing import overview

    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        rows = overview(pool)
    if as_json:
        show.json_out(rows)
        return
    if not rows:
        show.say("There are no volumes.")
        return
    head = ("NAME", "ID", "TYPE", "PROMISED", "USED", "SHARED", "SNAPSHOTS", "AGE", "PROBLEM")
    size, since = show.size, show.age_since
    text = [
        (
            row.name or "?",
            row.id,
            row.filesystem or ("block" if row.kind == "image" else row.kind or "?"),
            size(row.promised_bytes),
            size(row.used_bytes),
            size(row.shared_bytes),
            str(row.snapshots),
            since(row.created_ns),
            row.problem,
        )
        for row in rows
    ]
    show.columns(head, text)


@app.command()
def inspect(ctx: typer.Context, name: Name, output: Output = "text") -> None:
    """Show everything about one volume: its record, its space, where it is mounted, its snapshots and its health."""
    from moorage.plugin import local
    from moorage.storage.listing import shared_bytes
    from moorage.storage.transfer.import_ import state_of

    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        found = volume_named(pool, name)
        devices, mounts = local.places(pool, found)
        is_image = found.kind is VolumeKind.IMAGE and found.data.is_file()
        facts = {
            "volume": found,
            "used_bytes": pool.context.data_bytes(found.data, found.kind),
            "shared_bytes": shared_bytes(pool, os.fspath(found.data)) if is_image else 0,
            "devices": devices,
            "mounts": mounts,
            "snapshots": [cut.id for cut in pool.snapshots(volume_id=found.id).items],
            "attached_to": [held.node_id for held in pool.attachments(found.id)],
            "imported_state": state_of(found),
            "health": [f"{sign.status}: {sign.reason}: {sign.message}" for sign in pool.health(found.id)],
        }
    if as_json:
        show.json_out(facts)
        return
    record = {
        "name": found.name,
        "id": found.id,
        "type": found.filesystem or ("block" if found.kind is VolumeKind.IMAGE else "directory"),
        "promised": show.size(found.size_bytes) + ("" if found.size_enforced else " (not enforced)"),
        "used": show.size(int(str(facts["used_bytes"]))),
        "shared": show.size(int(str(facts["shared_bytes"]))),
        "made from": f"{found.source.kind} {found.source.id}, by {found.copy_path}" if found.source else "nothing",
        "data": str(found.data),
    }
    for key in ("devices", "mounts", "snapshots", "attached_to", "health"):
        value = facts[key]
        record[key.replace("_", " ")] = ", ".join(value) if isinstance(value, list) and value else "none"
    for key, text in record.items():
        show.say(f"{key + ':':<13}{text}")


# --- mounting ------------------------------------------------------------------------------


@app.command()
def mount(
    ctx: typer.Context,
    name: Name,
    path: Annotated[str, typer.Argument(help="Where; made if its parent exists.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="Mount it read-only.")] = False,
    option: Annotated[list[str] | None, typer.Option("-O", "--option", help="A mount option; repeatable.")] = None,
    output: Output = "text",
) -> None:
    """Mount a volume as the plugin does: formatted only if it is proven empty, checked, grown, verified."""
    from moorage.plugin import local

    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        found = volume_named(pool, name)
        done = local.mount(pool, found, path, read_only=read_only, options=option or ())
    if as_json:
        show.json_out(done)
    else:
        show.say(f"volume {found.id} is mounted at {done.path}{', newly formatted' if done.formatted else ''}")


@app.command()
def unmount(
    ctx: typer.Context,
    name: Name,
    path: Annotated[str, typer.Argument(help="Where it is mounted.")],
    output: Output = "text",
) -> None:
    """Unmount a volume and release its loop device; other mounts of it stay."""
    from moorage.plugin import local

    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        found = volume_named(pool, name)
        was_there = local.unmount(pool, found, path)
    if as_json:
        show.json_out({"volume": found.id, "path": os.path.abspath(path), "was_mounted": was_there})
    else:
        show.say(f"volume {found.id} is not mounted at {path}{' any more' if was_there else ''}")


# --- copies --------------------------------------------------------------------------------


@app.command()
def snapshot(
    ctx: typer.Context,
    name: Name,
    snapshot_name: Annotated[str, typer.Argument(help="The snapshot's name.")],
    in_use: Annotated[
        str, typer.Option(help="refuse, freeze or live: a volume in use where the pool has no reflinks.")
    ] = "refuse",
    output: Output = "text",
) -> None:
    """Cut a snapshot; a mounted volume is frozen for that moment."""
    as_json = show.check_output(output)
    _choice("--in-use", in_use, ("refuse", "freeze", "live"))
    with ctx.obj.open() as pool, show.progress_bar(f"snapshot {snapshot_name}") as progress:
        found = volume_named(pool, name)
        made = pool.create_snapshot(CreateSnapshot(snapshot_name, found.id, InUse(in_use)), progress)
    if as_json:
        show.json_out(made)
    else:
        show.say(f"snapshot {made.id} of volume {made.volume_id}, by {made.copy_path}")


@app.command()
def snapshots(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Only those of this volume.")] = "",
    output: Output = "text",
) -> None:
    """List snapshots, of one volume or of all."""
    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        # The volume itself may be gone; its snapshots are known by its id.
        found = pool.snapshots(volume_id=volume_named(pool, name).id if name else "").items
    if as_json:
        show.json_out(found)
        return
    rows = [
        (cut.name, cut.id, cut.volume_id, show.size(cut.size_bytes), show.size(cut.data_bytes), str(cut.copy_path))
        for cut in found
    ]
    show.columns(("NAME", "ID", "VOLUME", "SIZE", "HELD", "COPIED BY"), rows)


@app.command()
def clone(
    ctx: typer.Context,
    name: Name,
    new_name: Annotated[str, typer.Argument(help="The new volume's name.")],
    size: Annotated[str, typer.Option(help="A larger size, such as 20Gi.")] = "",
    in_use: Annotated[str, typer.Option(help="refuse, freeze or live.")] = "refuse",
    output: Output = "text",
) -> None:
    """Make a new volume with the content of another."""
    show.check_output(output)
    _choice("--in-use", in_use, ("refuse", "freeze", "live"))
    with ctx.obj.open() as pool:
        found = volume_named(pool, name)
        made = _copy(pool, new_name, found, Source.volume(found.id), size, InUse(in_use))
    _told(made, output, f"volume {made.id}, copied from {found.id} by {made.copy_path}")


@app.command()
def restore(
    ctx: typer.Context,
    name: SnapshotName,
    new_name: Annotated[str, typer.Argument(help="The new volume's name.")],
    size: Annotated[str, typer.Option(help="A larger size, such as 20Gi.")] = "",
    output: Output = "text",
) -> None:
    """Make a new volume from a snapshot."""
    show.check_output(output)
    with ctx.obj.open() as pool:
        found = snapshot_named(pool, name)
        made = _copy(pool, new_name, found, Source.snapshot(found.id), size, InUse.REFUSE)
    _told(made, output, f"volume {made.id}, restored from {found.id} by {made.copy_path}")


def _copy(pool: Pool, name: str, found: Volume | Snapshot, source: Source, size: str, in_use: InUse) -> Volume:
    request = CreateVolume(
        name,
        required_bytes=_bytes("--size", size),
        kind=found.kind,
        filesystem=found.filesystem,
        source=source,
        in_use=in_use,
    )
    with show.progress_bar(f"copy {found.name}") as progress:
        return pool.create_volume(request, progress)


@app.command()
def resize(
    ctx: typer.Context,
    name: Name,
    size: Annotated[str, typer.Argument(help="The new size, such as 20Gi; volumes do not shrink.")],
    output: Output = "text",
) -> None:
    """Make a volume larger; its filesystem follows at once if it is mounted here, else at its next mount."""
    from moorage.plugin import local

    show.check_output(output)
    wanted = _bytes("SIZE", size)
    if not wanted:
        raise UsageError("SIZE: a size such as 20Gi is needed")
    with ctx.obj.open() as pool:
        found = volume_named(pool, name)
        if wanted < found.size_bytes:
            raise UsageError(f"volume {found.id} has {show.size(found.size_bytes)}; volumes do not shrink to {size}")
        grown, waits = local.resize(pool, found, wanted)
    _told(grown, output, f"volume {grown.id} has {show.size(grown.size_bytes)}{waits and '; ' + waits}")


# --- export and import ---------------------------------------------------------------------


@app.command()
def export(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="A volume or snapshot; volume/NAME or snapshot/NAME if both exist.")],
    file: Annotated[str, typer.Argument(help="A file, or - for stdout.")],
    since: Annotated[str, typer.Option(help="Only what changed since this snapshot.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with FILE.partial.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE and FILE.partial.")] = False,
    skip: Annotated[int, typer.Option(help="Bytes of the stream that the reader of stdout has already.", min=0)] = 0,
    sync: Annotated[bool, typer.Option(help="Return when the file is on disk.")] = True,
    output: Output = "text",
) -> None:
    """Write a volume or snapshot as a stream: without holes, with checksums, whole or what changed since a snapshot.

    A volume is exported from a snapshot cut for it, which goes afterwards.
    """
    as_json = show.check_output(output)
    to = _To(file, resume, skip, sync)
    _check_export(to, overwrite, as_json)
    with ctx.obj.open() as pool:
        base = snapshot_named(pool, since) if since else None
        found = source_named(pool, source)
        with show.progress_bar(f"export {found.name}") as progress:
            if isinstance(found, Volume) and _is_cut_for_export(pool, found):
                with snapshot_for_export(pool, found, _left_behind(file) if resume else "") as cut:
                    try:
                        done = _export(pool, cut, base, to, progress)
                    except MoorageError:
                        how = f"`export snapshot/{cut.id} - --skip N`" if to.is_pipe else "--resume"
                        typer.echo(f"Snapshot {cut.id} stays, so that {how} can go on; remove it otherwise.", err=True)
                        raise
            else:
                done = _export(pool, found, base, to, progress)
    if as_json:
        show.json_out({"file": file, "source": found.id, "since": base.id if base else "", "result": done})
    elif not to.is_pipe:
        resumed = f", resumed at {show.size(done.resumed_at)}" if done.resumed_at else ""
        show.say(f"{file}: {show.size(done.data_bytes)} of data of {found.id}{resumed}")


def _is_cut_for_export(pool: Pool, found: Volume) -> bool:
    """Whether a snapshot costs nothing here; else the volume itself is exported, and has to be unused."""
    return pool.copies_by_reflink if found.kind is VolumeKind.IMAGE else pool.context.is_btrfs


@dataclass(frozen=True, slots=True)
class _To:
    """Where an export goes, and how."""

    file: str
    resume: bool
    skip: int
    sync: bool

    @property
    def is_pipe(self) -> bool:
        return self.file == "-"


def _check_export(to: _To, overwrite: bool, as_json: bool) -> None:
    file = to.file
    if to.is_pipe:
        if to.resume or overwrite:
            raise UsageError("stdout cannot be resumed or replaced; --skip leaves out what its reader has")
        if as_json:
            raise UsageError("-o json and the stream cannot both go to stdout; export to a file")
        if sys.stdout.isatty():
            raise UsageError("the stream is not for a terminal; give a file or redirect stdout")
        return
    if to.skip:
        raise UsageError("--skip is for stdout; a file is resumed with --resume")
    if to.resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    if os.path.lexists(file) and not overwrite:
        raise UsageError(f"{file} exists; give another name or --overwrite")
    if os.path.lexists(f"{file}.partial") and not (to.resume or overwrite):
        raise UsageError(f"{file}.partial is left from an export that did not end; give --resume or --overwrite")


def _left_behind(file: str) -> str:
    """The snapshot that an unfinished export of a volume was made from."""
    from moorage.storage.transfer.export import PARTIAL
    from moorage.storage.transfer.stream import scan

    try:
        with open(file + PARTIAL, "rb") as partial:
            found = scan(partial.fileno())
    except OSError:
        return ""
    return found.header.snapshot_id if found is not None else ""


def _export(pool: Pool, found: Any, base: Snapshot | None, to: _To, progress: Any) -> Any:
    from moorage.storage.transfer.export import export_to_file, export_to_pipe, subject_of

    subject = subject_of(pool, found, base)
    if to.is_pipe:
        return export_to_pipe(subject, sys.stdout.fileno(), progress, skip=to.skip)
    return export_to_file(subject, Path(to.file), progress, resume=to.resume, sync=to.sync)


@app.command(name="import")
def import_volume(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(help="A file that export wrote, or - for stdin.")],
    name: Annotated[str, typer.Option(help="The new volume's name (default: the name it had).")] = "",
    onto: Annotated[str, typer.Option(help="Apply what changed onto this volume, which has the older state.")] = "",
    restart: Annotated[bool, typer.Option("--restart", help="Forget an unfinished import.")] = False,
    checkpoint: Annotated[str, typer.Option(help="How much may have to be read again after a crash.")] = "256Mi",
    output: Output = "text",
) -> None:
    """Make a volume from a stream, or bring one to the next state; an import that was cut off goes on."""
    from moorage.storage.transfer.import_ import ImportRequest, import_stream

    as_json = show.check_output(output)
    if name and onto:
        raise UsageError("--name makes a new volume, --onto changes one: give one of them")
    every = _bytes("--checkpoint", checkpoint)
    try:
        fd = sys.stdin.fileno() if file == "-" else os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as failed:
        raise host_error("read", file, failed) from failed
    try:
        with ctx.obj.open() as pool, show.progress_bar(f"import {file}") as progress:
            target = volume_named(pool, onto).id if onto else ""
            done = import_stream(pool, fd, ImportRequest(name, target, restart, every), progress)
    finally:
        if file != "-":
            os.close(fd)
    if as_json:
        show.json_out(done)
    elif done.was_complete:
        show.say(f"volume {done.volume.id} has this content already")
    else:
        resumed = f", resumed at {show.size(done.resumed_at)} of the stream" if done.resumed_at else ""
        show.say(f"volume {done.volume.id}: {show.size(done.data_bytes)} of data{resumed}")


# --- deleting and coming back --------------------------------------------------------------


@app.command()
def remove(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A volume or snapshot; volume/NAME or snapshot/NAME if both exist.")],
    keep: Annotated[str, typer.Option(help="How long a volume can be undeleted, such as 7d.")] = "24h",
    output: Output = "text",
) -> None:
    """Move a volume or snapshot to the trash; one in use is refused."""
    from moorage.storage.usage import observe

    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        found = source_named(pool, name)
        what = "volume" if isinstance(found, Volume) else "snapshot"
        if isinstance(found, Volume):
            if not observe(found.data, found.kind):  # a refusal must not change how long it is kept
                pool.modify_volume(found.id, {"trashRetention": keep})
            pool.delete_volume(found.id)
        else:
            pool.delete_snapshot(found.id)
    if as_json:
        show.json_out({"what": what, "id": found.id})
    else:
        kept = f"; `undelete {found.name}` brings it back within {keep}" if what == "volume" else ""
        show.say(f"{what} {found.id} is in the trash{kept}")


@app.command()
def trash(ctx: typer.Context, output: Output = "text") -> None:
    """List what was deleted and can come back."""
    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        found = pool.trash()
    if as_json:
        show.json_out(found)
        return
    rows = [
        (item.name, item.what, item.id, show.age_since(item.deleted_ns), show.size(item.allocated_bytes))
        for item in found
    ]
    show.columns(("NAME", "WHAT", "ID", "DELETED", "USED"), rows)


@app.command()
def undelete(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The name or id that it had.")],
    what: Annotated[str, typer.Option(help="volume, snapshot or group.")] = "volume",
    output: Output = "text",
) -> None:
    """Bring the youngest deleted object of this name back."""
    as_json = show.check_output(output)
    _choice("--what", what, ("volume", "snapshot", "group"))
    with ctx.obj.open() as pool:
        ident = pool.undelete(name, what)
    if as_json:
        show.json_out({"what": what, "id": ident})
    else:
        show.say(f"{what} {ident} is back")


@app.command()
def check(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A volume; none: all of them.")] = "",
    output: Output = "text",
) -> None:
    """Check the record, the data and the filesystem, without changing anything; exit 1 when something is wrong."""
    from moorage.plugin import local

    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        if name:
            idents = [volume_named(pool, name).id if name not in pool.damaged() else name]
        else:
            idents = sorted([*(found.id for found in pool.volumes().items), *pool.damaged()])
        results = {}
        with show.progress_bar("check") as progress:
            for done, ident in enumerate(idents):
                results[ident] = local.check(pool, ident)
                if progress is not None:
                    progress(done + 1, len(idents))
    if as_json:
        show.json_out(results)
    for ident, entries in results.items() if not as_json else ():
        for entry in entries:
            mark = {True: "ok", False: "FAILED", None: "note"}[entry.ok]
            show.say(f"{ident}  {entry.what:<11}{mark:<8}{entry.said}".rstrip())
    if any(entry.ok is False for entries in results.values() for entry in entries):
        raise typer.Exit(1)
