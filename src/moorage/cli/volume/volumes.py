"""`moorage volume`: make, show, mount, check and remove volumes."""

import os
import time
from collections.abc import Sequence
from shlex import quote
from typing import Annotated

import typer

from moorage.cli import show
from moorage.cli.app import Output, WideOutput
from moorage.cli.sizes import bytes_from
from moorage.cli.volume.group import Name, app, check_choice, tell
from moorage.storage import CreateVolume, Volume, VolumeKind
from moorage.storage.guests import source_named, volume_named
from moorage.storage.listing import VolumeRow, overview


@app.command()
def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A name for it; the id is made from the name.")],
    size: Annotated[str, typer.Option(metavar="SIZE", help="Its size.")] = "1Gi",
    kind: Annotated[str, typer.Option(metavar="KIND", help="image or directory.")] = "image",
    filesystem: Annotated[
        str, typer.Option(metavar="NAME", help="ext4, xfs, btrfs, or block for a raw device.")
    ] = "ext4",
    thick: Annotated[bool, typer.Option("--thick", help="Allocate all the space now.")] = False,
    new_pool: Annotated[bool, typer.Option("--new-pool", help="Make the pool if the directory is empty.")] = False,
    output: Output = "text",
) -> None:
    """Make a volume; the same call again changes nothing.

    Examples:

      moorage volume --pool /srv/pool create db --size 10Gi --new-pool

      moorage volume --pool /srv/pool create files --kind directory
    """
    show.check_output(output)
    check_choice("--kind", kind, ("image", "directory"))
    check_choice("--filesystem", filesystem, ("ext4", "xfs", "btrfs", "block"))
    request = CreateVolume(
        name,
        required_bytes=bytes_from("--size", size),
        kind=VolumeKind(kind),
        filesystem="" if filesystem == "block" or kind == "directory" else filesystem,
        thick=thick,
    )
    with ctx.obj.open(make=new_pool) as pool, show.progress_bar(f"create {name}") as progress:
        made = pool.create_volume(request, progress)
    tell(made, output, f"volume {made.id} of {show.size(made.size_bytes)}")


@app.command(name="list")
def list_volumes(ctx: typer.Context, output: WideOutput = "text") -> None:
    """List all volumes: their size, what they use of it, and how many snapshots they have.

    A volume that was made for a claim is shown as NAMESPACE/CLAIM. -o wide adds names, ids and shared space.

    Examples:

      moorage volume --pool /var/lib/moorage list

      moorage volume --pool /var/lib/moorage list -o wide
    """
    as_json = show.check_output(output, "wide")
    with ctx.obj.open() as pool:
        rows, deleted = overview(pool), pool.trash.listed()
    if as_json:
        show.json_out(rows)
        return
    if output == "wide":
        _list_wide(rows)
    elif rows:
        _list_short(rows)
    else:
        show.say("There are no volumes.")
    if deleted:
        count = "1 deleted volume or snapshot" if len(deleted) == 1 else f"{len(deleted)} deleted volumes or snapshots"
        show.say(f"{count} can be brought back; `moorage volume trash` lists them.", style="dim", err=True)


def _list_short(rows: Sequence[VolumeRow]) -> None:
    text = [
        (
            row.claim or row.name or row.id,
            _type_of(row),
            show.size(row.size_bytes),
            show.size(row.used_bytes),
            str(row.snapshots),
            show.age_since(row.created_ns),
        )
        for row in rows
    ]
    show.columns(("VOLUME", "TYPE", "SIZE", "USED", "SNAPS", "AGE"), text)
    for row in rows:
        if row.problem:
            show.paragraph(f"{row.claim or row.name or row.id}: {row.problem}", style="red")


def _list_wide(rows: Sequence[VolumeRow]) -> None:
    head = ("CLAIM", "NAME", "ID", "TYPE", "SIZE", "USED", "SHARED", "SNAPS", "AGE", "PROBLEM")
    text = [
        (
            row.claim,
            row.name or "?",
            row.id,
            _type_of(row),
            show.size(row.size_bytes),
            show.size(row.used_bytes),
            show.size(row.shared_bytes),
            str(row.snapshots),
            show.age_since(row.created_ns),
            row.problem,
        )
        for row in rows
    ]
    show.columns(head, text, is_wide=True)


def _type_of(row: VolumeRow) -> str:
    return row.filesystem or {"image": "block", "directory": "dir"}.get(row.kind, "?")


@app.command()
def inspect(ctx: typer.Context, name: Name, output: Output = "text") -> None:
    """Show one volume: its record, its space, where it is mounted, its snapshots and its health.

    Examples:

      moorage volume --pool /var/lib/moorage inspect shop/data
    """
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
            "snapshots": [cut.id for cut in pool.snapshots.page(volume_id=found.id).items],
            "attached_to": [held.node_id for held in pool.attachments.of_volume(found.id)],
            "imported_state": state_of(found),
            "health": [f"{sign.status}: {sign.reason}: {sign.message}" for sign in pool.health.of(found.id)],
        }
    if as_json:
        show.json_out(facts)
        return
    record = {
        "name": found.name,
        "id": found.id,
        "claim": found.claim or "none",
        "type": found.filesystem or ("block" if found.kind is VolumeKind.IMAGE else "directory"),
        "size": show.size(found.size_bytes) + ("" if found.size_enforced else " (not enforced)"),
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


@app.command()
def mount(
    ctx: typer.Context,
    name: Name,
    path: Annotated[str, typer.Argument(help="Where to mount it; made if its parent exists.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="Mount it read-only.")] = False,
    option: Annotated[
        list[str] | None, typer.Option("-O", "--option", metavar="OPTION", help="A mount option.")
    ] = None,
    output: Output = "text",
) -> None:
    """Mount a volume as the plugin does: formatted only if it is proven empty, checked, grown, verified.

    Examples:

      moorage volume --pool /srv/pool mount db /mnt/db

      moorage volume --pool /srv/pool mount db /mnt/db --read-only -O noexec
    """
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
    """Unmount a volume and release its loop device; other mounts of it stay.

    Examples:

      moorage volume --pool /srv/pool unmount db /mnt/db
    """
    from moorage.plugin import local

    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        found = volume_named(pool, name)
        was_there = local.unmount(pool, found, path)
    if as_json:
        show.json_out({"id": found.id, "path": os.path.abspath(path), "was_mounted": was_there})
    else:
        show.say(f"volume {found.id} is not mounted at {path}{' any more' if was_there else ''}")


@app.command()
def remove(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A volume or snapshot; volume/NAME or snapshot/NAME if both exist.")],
    keep: Annotated[
        str, typer.Option(metavar="DURATION", help="How long a volume can be brought back, such as 7d.")
    ] = "24h",
    output: Output = "text",
) -> None:
    """Move a volume or snapshot to the trash; one in use is refused.

    Examples:

      moorage volume --pool /srv/pool remove db --keep 7d

      moorage volume --pool /srv/pool remove snapshot/monday
    """
    from moorage.storage.usage import observe

    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        found = source_named(pool, name)
        what = "volume" if isinstance(found, Volume) else "snapshot"
        if isinstance(found, Volume):
            if not observe(found.data, found.kind):  # a refusal must not change how long it is kept
                pool.volumes.modify(found.id, {"trashRetention": keep})
            pool.delete_volume(found.id)
        else:
            pool.delete_snapshot(found.id)
    if as_json:
        show.json_out({"what": what, "id": found.id})
    else:
        kept = f"; `undelete {quote(found.name)}` brings it back within {keep}" if what == "volume" else ""
        show.say(f"{what} {found.id} is in the trash{kept}")


@app.command()
def trash(ctx: typer.Context, output: Output = "text") -> None:
    """List the deleted volumes and snapshots that can be brought back.

    Examples:

      moorage volume --pool /var/lib/moorage trash
    """
    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        found = pool.trash.listed()
    if as_json:
        show.json_out(found)
        return
    if not found:
        show.say("The trash is empty.")
        return
    rows = [
        (
            item.claim or item.name,
            item.what,
            show.age_since(item.deleted_ns),
            _left(item.expires_ns),
            show.size(item.used_bytes),
        )
        for item in found
    ]
    show.columns(("DELETED", "WHAT", "AGE", "KEPT FOR", "USED"), rows)


def _left(expires_ns: int) -> str:
    return show.age(max(0.0, expires_ns / 1e9 - time.time()))


@app.command()
def undelete(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The name, id or claim that it had.")],
    what: Annotated[str, typer.Option(metavar="KIND", help="volume, snapshot or group.")] = "volume",
    output: Output = "text",
) -> None:
    """Bring a deleted volume or snapshot back; of several with one name, the one deleted last.

    Examples:

      moorage volume --pool /var/lib/moorage undelete shop/data

      moorage volume --pool /srv/pool undelete monday --what snapshot
    """
    as_json = show.check_output(output)
    check_choice("--what", what, ("volume", "snapshot", "group"))
    with ctx.obj.open() as pool:
        ident = pool.undelete(name, what)
    if as_json:
        show.json_out({"what": what, "id": ident})
    else:
        show.say(f"{what} {ident} is back")


@app.command()
def check(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(help="A volume: its name, id, or claim as NAMESPACE/CLAIM. Without one: all.")
    ] = "",
    output: Output = "text",
) -> None:
    """Check the record, the data and the filesystem of volumes; exit 1 when something is wrong. It changes nothing.

    Examples:

      moorage volume --pool /srv/pool check

      moorage volume --pool /srv/pool check db
    """
    from moorage.plugin import local

    as_json = show.check_output(output)
    with ctx.obj.open() as pool:
        if name:
            idents = [volume_named(pool, name).id if name not in pool.health.damaged() else name]
        else:
            idents = sorted([*(found.id for found in pool.volumes.page().items), *pool.health.damaged()])
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
