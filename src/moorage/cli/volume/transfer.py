"""`moorage volume export` and `import`: a volume as a stream."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from moorage.cli import extras, show
from moorage.cli.app import Output
from moorage.cli.sizes import bytes_from
from moorage.cli.volume.group import app
from moorage.errors import MoorageError, UsageError
from moorage.host.errors import host_error
from moorage.storage import Pool, Snapshot, Volume, VolumeKind
from moorage.storage.guests import snapshot_for_export, snapshot_named, source_named, volume_named


@app.command()
def export(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="A volume or snapshot; volume/NAME or snapshot/NAME if both exist.")],
    file: Annotated[str, typer.Argument(help="A file, or - for stdout.")],
    since: Annotated[str, typer.Option(metavar="SNAPSHOT", help="Only what changed since this snapshot.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted export, FILE.partial.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE and FILE.partial.")] = False,
    skip: Annotated[
        int, typer.Option(metavar="BYTES", help="Leave out these first bytes of the stream, on stdout.", min=0)
    ] = 0,
    sync: Annotated[bool, typer.Option(help="Wait until the file is on disk.")] = True,
    output: Output = "text",
) -> None:
    """Write a volume or snapshot as a stream: without holes, with checksums, whole or what changed since a snapshot.

    A volume is exported from a snapshot that is made for it and removed afterwards.

    Examples:

      moorage volume --pool /srv/pool export db /backup/db.mx

      moorage volume --pool /srv/pool export tuesday - --since monday | ssh …
    """
    extras.require("volume export")
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
                        how = f"`export {quote(f'snapshot/{cut.id}')} - --skip N`" if to.is_pipe else "--resume"
                        show.say(f"Snapshot {cut.id} stays, so that {how} can go on; remove it otherwise.", err=True)
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
    file: Annotated[str, typer.Argument(help="A file that `export` wrote, or - for stdin.")],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="A name for the new volume. Otherwise the name it had.")
    ] = "",
    onto: Annotated[
        str, typer.Option(metavar="VOLUME", help="Apply the changes to this volume, which has the older state.")
    ] = "",
    restart: Annotated[bool, typer.Option("--restart", help="Start again, without an interrupted import.")] = False,
    checkpoint: Annotated[
        str, typer.Option(metavar="SIZE", help="How much may be read again after a crash.")
    ] = "256Mi",
    output: Output = "text",
) -> None:
    """Make a volume from a stream, or bring one to the next state. An interrupted import continues.

    Examples:

      moorage volume --pool /srv/pool import /backup/db.mx --name db2

      ssh … | moorage volume --pool /srv/pool import - --onto db
    """
    extras.require("volume import")
    from moorage.storage.transfer.import_ import ImportRequest, import_stream

    as_json = show.check_output(output)
    if name and onto:
        raise UsageError("--name makes a new volume, --onto changes one: give one of them")
    every = bytes_from("--checkpoint", checkpoint)
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
