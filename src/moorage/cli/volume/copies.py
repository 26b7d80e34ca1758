"""`moorage volume`: snapshots, clones, restores and growth."""

from typing import Annotated

import typer

from moorage.cli import show
from moorage.cli.app import Output
from moorage.cli.sizes import bytes_from
from moorage.cli.volume.group import Name, SnapshotName, app, check_choice, tell
from moorage.errors import UsageError
from moorage.storage import CreateSnapshot, CreateVolume, InUse, Pool, Snapshot, Source, Volume
from moorage.storage.guests import snapshot_named, volume_named

_IN_USE = "What to do with a volume in use, on a pool without reflinks: refuse, freeze or live."


@app.command()
def snapshot(
    ctx: typer.Context,
    name: Name,
    snapshot_name: Annotated[str, typer.Argument(help="A name for the snapshot.")],
    in_use: Annotated[str, typer.Option(metavar="HOW", help=_IN_USE)] = "refuse",
    output: Output = "text",
) -> None:
    """Make a snapshot of a volume; a mounted volume is frozen for that moment.

    Examples:

      moorage volume --pool /srv/pool snapshot db monday
    """
    as_json = show.check_output(output)
    check_choice("--in-use", in_use, ("refuse", "freeze", "live"))
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
    name: Annotated[str, typer.Argument(help="Only those of this volume: its name, id, or claim.")] = "",
    output: Output = "text",
) -> None:
    """List snapshots, of one volume or of all.

    Examples:

      moorage volume --pool /srv/pool snapshots db
    """
    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        # The volume itself may be gone; its snapshots are known by its id.
        found = pool.snapshots.page(volume_id=volume_named(pool, name).id if name else "").items
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
    new_name: Annotated[str, typer.Argument(help="A name for the new volume.")],
    size: Annotated[str, typer.Option(metavar="SIZE", help="A larger size.")] = "",
    in_use: Annotated[str, typer.Option(metavar="HOW", help=_IN_USE)] = "refuse",
    output: Output = "text",
) -> None:
    """Make a new volume with the content of another.

    Examples:

      moorage volume --pool /srv/pool clone db db-test --size 20Gi
    """
    show.check_output(output)
    check_choice("--in-use", in_use, ("refuse", "freeze", "live"))
    with ctx.obj.open() as pool:
        found = volume_named(pool, name)
        made = _copy(pool, new_name, found, Source.volume(found.id), size, InUse(in_use))
    tell(made, output, f"volume {made.id}, copied from {found.id} by {made.copy_path}")


@app.command()
def restore(
    ctx: typer.Context,
    name: SnapshotName,
    new_name: Annotated[str, typer.Argument(help="A name for the new volume.")],
    size: Annotated[str, typer.Option(metavar="SIZE", help="A larger size.")] = "",
    output: Output = "text",
) -> None:
    """Make a new volume from a snapshot.

    Examples:

      moorage volume --pool /srv/pool restore monday db-monday
    """
    show.check_output(output)
    with ctx.obj.open() as pool:
        found = snapshot_named(pool, name)
        made = _copy(pool, new_name, found, Source.snapshot(found.id), size, InUse.REFUSE)
    tell(made, output, f"volume {made.id}, restored from {found.id} by {made.copy_path}")


def _copy(pool: Pool, name: str, found: Volume | Snapshot, source: Source, size: str, in_use: InUse) -> Volume:
    request = CreateVolume(
        name,
        required_bytes=bytes_from("--size", size),
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
    """Make a volume larger; its filesystem follows at once if it is mounted here, else at its next mount.

    Examples:

      moorage volume --pool /srv/pool resize db 20Gi
    """
    from moorage.plugin import local

    show.check_output(output)
    wanted = bytes_from("SIZE", size)
    if not wanted:
        raise UsageError("SIZE: a size such as 20Gi is needed")
    with ctx.obj.open() as pool:
        found = volume_named(pool, name)
        if wanted < found.size_bytes:
            raise UsageError(f"volume {found.id} has {show.size(found.size_bytes)}; volumes do not shrink to {size}")
        grown, waits = local.resize(pool, found, wanted)
    tell(grown, output, f"volume {grown.id} has {show.size(grown.size_bytes)}{waits and '; ' + waits}")
