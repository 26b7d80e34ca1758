"""`moorage volume` as a person types it, on a pool without any mount."""

import json
import os
import subprocess
import sys

import pytest

from moorage.cli import show
from moorage.storage import CreateVolume, Pool, PoolConfig, VolumeKind

MIB = 1 << 20


@pytest.fixture
def volume(tmp_path):
    """Run `moorage volume --pool POOL ARGUMENTS`; returns what `subprocess.run` does."""

    def run(*arguments, pool=tmp_path / "pool", **how):
        argv = [sys.executable, "-m", "moorage.cli.main", "volume", "--pool", str(pool), *map(str, arguments)]
        return subprocess.run(argv, capture_output=True, timeout=60, check=False, cwd=tmp_path, **how)

    return run


def made(volume, *arguments):
    done = volume(*arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fill(record, offset, content):
    with open(record["data"], "r+b") as file:
        file.seek(offset)
        file.write(content)


def test_the_life_of_a_volume_without_a_cluster(volume, tmp_path):
    first = made(volume, "create", "a", "--size", "20Mi", "--filesystem", "block", "--new-pool")
    fill(first, MIB, os.urandom(MIB))
    cut = made(volume, "snapshot", "a", "s1")
    assert cut["volume_id"] == first["id"]
    assert made(volume, "clone", "a", "b")["source"] == {"kind": "volume", "id": first["id"]}
    assert made(volume, "restore", "s1", "c", "--size", "30Mi")["size_bytes"] == 30 * MIB
    assert made(volume, "resize", "a", "25Mi")["size_bytes"] == 25 * MIB
    assert [row["name"] for row in made(volume, "snapshots", "a")] == ["s1"]

    rows = {row["name"]: row for row in made(volume, "list")}
    assert rows["a"]["size_bytes"] == 25 * MIB
    assert MIB <= rows["a"]["used_bytes"] < 2 * MIB
    assert (rows["a"]["snapshots"], rows["b"]["snapshots"]) == (1, 0)
    text = volume("list").stdout.decode()
    assert text.splitlines()[0].split() == ["VOLUME", "TYPE", "SIZE", "USED", "SNAPS", "AGE"]
    assert "25Mi" in text
    assert made(volume, "inspect", "a")["snapshots"] == [cut["id"]]

    assert volume("remove", "b").returncode == 0
    assert [item["name"] for item in made(volume, "trash")] == ["b"]
    assert made(volume, "undelete", "b")["what"] == "volume"
    assert made(volume, "trash") == []
    assert volume("check").returncode == 0


def test_volumes_are_listed_and_named_by_their_claims(volume, tmp_path):
    name = "pvc-6f7ad0b4-0a4e-4d2c-9d0f-3a9c2b1de2f7"
    with Pool.open(PoolConfig("pool", tmp_path / "pool", background=False)) as pool:
        first = pool.create_volume(CreateVolume(name, MIB, filesystem="", claim="shop/data"))
        pool.create_volume(CreateVolume("by-hand", MIB, filesystem=""))
        pool.create_volume(CreateVolume("x" * 60, MIB, kind=VolumeKind.DIRECTORY))
    lines = volume("list").stdout.decode().splitlines()
    assert [line.split()[0] for line in lines] == ["VOLUME", "by-hand", "shop/data", "x" * 60]
    wide = volume("list", "-o", "wide").stdout.decode().splitlines()
    assert wide[0].split()[:3] == ["CLAIM", "NAME", "ID"]
    assert [line.split()[:3] for line in wide if "shop" in line] == [["shop/data", name, first.id]]
    assert made(volume, "inspect", "shop/data")["volume"]["id"] == first.id

    assert volume("remove", "shop/data").returncode == 0
    assert [(item["claim"], item["name"]) for item in made(volume, "trash")] == [("shop/data", name)]
    assert "shop/data" in volume("trash").stdout.decode()
    assert b"1 deleted volume or snapshot can be brought back" in volume("list").stderr
    assert made(volume, "undelete", "shop/data") == {"what": "volume", "id": first.id}
    assert b"The trash is empty." in volume("trash").stdout


def test_a_claim_with_several_volumes_is_no_name_for_one(volume, tmp_path):
    with Pool.open(PoolConfig("pool", tmp_path / "pool", background=False)) as pool:
        for name in ("one", "two"):
            pool.create_volume(CreateVolume(name, MIB, filesystem="", claim="shop/data"))
    done = volume("remove", "shop/data")
    assert done.returncode == 2
    assert b"several volumes were made for the claim shop/data: one-" in done.stderr


def test_a_list_on_a_terminal_fits_its_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    long = f"{'n' * 63}/{'c' * 200}"
    show.columns(("VOLUME", "TYPE", "SIZE"), [(long, "ext4", "10Gi"), ("short", "dir", "1Gi")])
    head, cut, short = capsys.readouterr().out.splitlines()
    assert len(head) <= len(cut) == 80
    assert cut.startswith("nnnn")
    assert "…" in cut
    assert cut.endswith("ccc  ext4  10Gi")
    assert short.split() == ["short", "dir", "1Gi"]
    show.columns(("VOLUME", "TYPE", "SIZE"), [(long, "ext4", "10Gi")], is_wide=True)
    assert long in capsys.readouterr().out


def test_a_stream_goes_through_files_and_pipes(volume, tmp_path):
    first = made(volume, "create", "a", "--size", "8Mi", "--filesystem", "block", "--new-pool")
    fill(first, MIB, os.urandom(MIB))
    made(volume, "snapshot", "a", "s1")
    assert volume("export", "s1", "full.mx").returncode == 0
    fill(first, 3 * MIB, b"changed")
    made(volume, "snapshot", "a", "s2")
    assert volume("export", "s2", "delta.mx", "--since", "s1").returncode == 0
    assert (tmp_path / "delta.mx").stat().st_size < 100_000

    piped = volume("export", "s1", "-").stdout
    assert piped == (tmp_path / "full.mx").read_bytes()
    other = tmp_path / "other"
    Pool.open(PoolConfig("other", other, background=False)).close()
    assert volume("import", "-", pool=other, input=piped).returncode == 0
    done = volume("import", "delta.mx", "--onto", "a", "-o", "json", pool=other)
    record = json.loads(done.stdout)["volume"]
    with open(record["data"], "rb") as ours, open(first["data"], "rb") as theirs:
        assert ours.read() == theirs.read()
    again = volume("import", "delta.mx", "--onto", "a", pool=other)
    assert b"already" in again.stdout


def test_an_export_never_replaces_a_file_unasked(volume, tmp_path):
    made(volume, "create", "a", "--size", "2Mi", "--new-pool")
    (tmp_path / "there").write_text("mine")
    done = volume("export", "a", "there")
    assert done.returncode == 2
    assert b"exists" in done.stderr
    assert (tmp_path / "there").read_text() == "mine"
    assert volume("export", "a", "there", "--overwrite").returncode == 0


BAD = [
    (("create", "a", "--size", "10x"), "quantity"),
    (("create", "a", "--size", "-1Gi"), "more than nothing"),
    (("create", "a", "--kind", "cube"), "image, directory"),
    (("create", "a", "--filesystem", "zfs"), "ext4, xfs"),
    (("create", ""), "empty"),
    (("create", "a\x07"), "control character"),
    (("create",), "NAME is missing"),
    (("list", "-o", "yaml"), "text, wide or json"),
    (("resize", "v", "1Mi"), "do not shrink"),
    (("resize", "v", "0"), "more than nothing"),
    (("snapshot", "v", "s", "--in-use", "maybe"), "refuse, freeze, live"),
    (("export", "v", "-", "-o", "json"), "stdout"),
    (("export", "v", "f", "--resume", "--overwrite"), "exclude"),
    (("export", "v", "f", "--skip", "5"), "--resume"),
    (("export", "v", "-", "--resume"), "--skip"),
    (("import", "pool/pool.json"), "no export"),
    (("import", "x", "--name", "a", "--onto", "v"), "one of them"),
    (("import", "x", "--checkpoint", "lots"), "quantity"),
    (("remove", "v", "--keep", "long"), "duration"),
    (("undelete", "v", "--what", "pod"), "volume, snapshot, group"),
    (("mount", "v", "/"), "root directory"),
    (("frobnicate",), "frobnicate"),
]


@pytest.mark.parametrize(("arguments", "word"), BAD)
def test_bad_input_gets_a_sentence_and_exit_code_2(volume_in_process, arguments, word):
    code, text = volume_in_process(*arguments)
    assert code == 2, text
    assert word in text
    assert "Traceback" not in text


FAILING = [
    (("inspect", "nothing"), "does not exist"),
    (("restore", "nothing", "x"), "does not exist"),
    (("undelete", "nothing"), "does not exist"),
    (("import", "missing-file"), "No such file"),
    (("import", "pool"), "Is a directory"),
    (("export", "v", "pool", "--overwrite"), "Is a directory"),
    (("export", "v", "/proc/nowhere/f"), "No such file"),
    (("create", "v", "--size", "5Mi"), "exists already"),
    (("create", "huge", "--size", "900Ti"), "can ever give"),
]


@pytest.mark.parametrize(("arguments", "word"), FAILING)
def test_what_cannot_be_done_gets_a_sentence_and_exit_code_1(volume_in_process, arguments, word):
    code, text = volume_in_process(*arguments)
    assert code == 1, text
    assert word in text


@pytest.fixture
def volume_in_process(tmp_path, monkeypatch, capfd):
    """The same command line without a new process for each try."""
    from moorage.cli import main
    from moorage.storage import CreateVolume

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moorage.log.configure", lambda *_: None)  # its handler would outlive the captured stderr
    monkeypatch.setattr("sys.argv", ["moorage", "volume"])
    with Pool.open(PoolConfig("p", tmp_path / "pool", background=False)) as pool:
        pool.create_volume(CreateVolume("v", 3 * MIB))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main.main(["volume", "--pool", str(tmp_path / "pool"), *arguments])
        out = capfd.readouterr()
        return ended.value.code, out.out + out.err

    return run


def test_a_missing_pool_is_a_sentence_and_exit_code_1(volume, tmp_path):
    for where in (tmp_path / "nowhere", tmp_path):
        done = volume("list", pool=where)
        assert done.returncode == 1
        assert b"there is no pool" in done.stderr
    assert not (tmp_path / "nowhere").exists()  # looking makes nothing


def test_a_name_of_a_volume_and_a_snapshot_has_to_be_told_apart(volume):
    made(volume, "create", "same", "--size", "2Mi", "--new-pool")
    made(volume, "snapshot", "same", "same")
    done = volume("remove", "same")
    assert done.returncode == 2
    assert b"snapshot/same" in done.stderr
    assert volume("remove", "snapshot/same").returncode == 0


def test_a_damaged_record_is_listed_and_checked(volume, tmp_path):
    first = made(volume, "create", "a", "--size", "2Mi", "--new-pool")
    (tmp_path / "pool" / "volumes" / first["id"] / "volume.json").write_text("{")
    (row,) = made(volume, "list")
    assert "cannot be read" in row["problem"]
    done = volume("check")
    assert done.returncode == 1
    assert b"FAILED" in done.stdout
    assert volume("check", first["id"]).returncode == 1


def test_a_progress_bar_shows_on_a_terminal_only(volume, tmp_path):
    import pty

    first = made(volume, "create", "a", "--size", "8Mi", "--filesystem", "block", "--new-pool")
    fill(first, 0, os.urandom(MIB))
    quiet = volume("export", "a", "one")
    assert quiet.stderr == b""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "moorage.cli.main", "volume", "--pool", str(tmp_path / "pool"), "export", "a", "two"]
    process = subprocess.Popen(argv, stderr=theirs, stdout=subprocess.DEVNULL, cwd=tmp_path)
    os.close(theirs)
    seen = b""
    with open(ours, "rb", buffering=0) as terminal:
        try:
            while chunk := terminal.read(4096):
                seen += chunk
        except OSError:  # how a terminal says that the other side has closed
            pass
    assert process.wait(60) == 0
    assert b"export a" in seen
