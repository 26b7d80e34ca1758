"""Files of secrets, configMaps and projected volumes: what a crash, a failure or somebody else's links do to them."""

import errno
import os
import stat

import pytest

from moorage.errors import InvalidRequest
from moorage.node.volumes.mounters import payload
from moorage.node.volumes.mounters.payload import File, write_payload

FILES = {"password": File(b"secret", 0o400), "sub/name": File(b"bob", 0o444)}


@pytest.fixture
def volume(tmp_path):
    made = tmp_path / "volume"
    made.mkdir(mode=0o777)
    return made


@pytest.fixture
def host(tmp_path):
    """A directory that is nobody's business."""
    made = tmp_path / "host"
    made.mkdir(mode=0o700)
    (made / "password").write_text("of the host")
    (made / "password").chmod(0o600)
    return made


def shown(volume):
    found = {}
    for path in ("password", "sub/name"):
        status = (volume / path).stat()
        found[path] = File((volume / path).read_bytes(), stat.S_IMODE(status.st_mode))
    return found


def untouched(host):
    password = host / "password"
    return (
        [one.name for one in host.iterdir()] == ["password"]
        and password.read_text() == "of the host"
        and stat.S_IMODE(password.stat().st_mode) == 0o600
        and stat.S_IMODE(host.stat().st_mode) == 0o700
    )


def copies(volume):
    return [one.name for one in volume.iterdir() if one.name.startswith(("..2", "..data_tmp"))]


@pytest.mark.parametrize("taken", ["..2", "sub"])
def test_a_link_put_in_the_place_of_a_fresh_directory_leads_nowhere(volume, host, monkeypatch, taken):
    make = os.mkdir

    def swapped(path, *args, **more):
        make(path, *args, **more)
        if os.path.basename(path).startswith(taken):
            os.rename(path, f"{path}.aside", src_dir_fd=more.get("dir_fd"), dst_dir_fd=more.get("dir_fd"))
            os.symlink(host, path, dir_fd=more.get("dir_fd"))

    with monkeypatch.context() as patch:
        patch.setattr(payload.os, "mkdir", swapped)
        with pytest.raises(OSError, match="Not a directory"):
            write_payload(volume, FILES)
    assert untouched(host)
    assert write_payload(volume, FILES)
    assert shown(volume) == FILES
    assert len(copies(volume)) == 1


def test_the_files_are_written_into_what_was_made_although_its_name_is_taken_meanwhile(volume, host, monkeypatch):
    opened = os.open

    def swapped(path, flags, *args, **more):
        if path == "password" and flags & os.O_CREAT:
            (fresh,) = copies(volume)
            os.rename(volume / fresh, volume / "aside")
            os.symlink(host, volume / fresh)
        return opened(path, flags, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(payload.os, "open", swapped)
        write_payload(volume, FILES)
    assert untouched(host)
    assert (volume / "aside" / "password").read_bytes() == b"secret"
    assert write_payload(volume, FILES)  # `..data` leads to the host by way of that link: that is not what is wanted
    assert shown(volume) == FILES
    assert untouched(host)


@pytest.mark.parametrize("name", ["..data", "..data_tmp", "password", "sub"])
@pytest.mark.parametrize("kind", ["link", "directory", "file", "pipe"])
def test_whatever_has_taken_a_name_is_replaced_and_not_followed(volume, host, name, kind):
    write_payload(volume, FILES)
    place = volume / name
    place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to(host)
    elif kind == "directory":
        (place / "deep").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.write_text("mine")
    write_payload(volume, FILES)
    assert shown(volume) == FILES
    assert len(copies(volume)) == 1
    assert untouched(host)


@pytest.mark.parametrize("kind", ["link", "pipe", "larger", "mode"])
def test_a_file_that_is_not_the_one_that_was_written_is_written_again(volume, host, kind):
    write_payload(volume, FILES)
    place = volume / "..data" / "password"
    if kind == "mode":
        place.chmod(0o777)
    else:
        place.unlink()
        {
            "link": lambda: place.symlink_to(host / "password"),
            "pipe": lambda: os.mkfifo(place),
            "larger": lambda: place.write_bytes(b"secret and more"),
        }[kind]()
    assert write_payload(volume, FILES)
    assert shown(volume) == FILES
    assert untouched(host)


class Killed(BaseException):
    """The process is gone at this line."""


def test_a_crash_after_any_step_is_made_good_by_the_next_write(volume, monkeypatch):
    steps = ("mkdir", "open", "symlink", "replace", "unlink", "rmdir", "fchmod")
    old = {"password": File(b"old", 0o400), "gone": File(b"old", 0o400)}
    for ends_at in range(1, 100):
        write_payload(volume, old)
        left = [ends_at]

        def counted(real, left=left):
            def step(*args, **more):
                if left[0] == 0:
                    raise Killed  # and nothing is tidied up, for every further step fails as well
                left[0] -= 1
                return real(*args, **more)

            return step

        with monkeypatch.context() as patch:
            for name in steps:
                patch.setattr(payload.os, name, counted(getattr(os, name)))
            try:
                write_payload(volume, FILES)
            except Killed:
                is_over = False
            else:
                is_over = True
        write_payload(volume, FILES)
        assert shown(volume) == FILES, ends_at
        assert not os.path.lexists(volume / "gone")
        assert len(copies(volume)) == 1
        if is_over:
            assert ends_at > 10
            return
    raise AssertionError("it never came to its end")


def test_a_write_that_fails_leaves_what_was_there_and_no_copy_of_the_secret(volume, monkeypatch):
    write_payload(volume, {"password": File(b"old", 0o400)})

    def full(fd, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(payload.os, "fchmod", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                write_payload(volume, FILES)
    assert (volume / "password").read_bytes() == b"old"
    assert len(copies(volume)) == 1


def test_what_earlier_writes_have_left_goes_with_the_next_one_even_if_nothing_is_new(volume):
    write_payload(volume, FILES)
    (volume / "..2020_01_01_00_00_00.1" / "sub").mkdir(parents=True)
    (volume / "..2020_01_01_00_00_00.1" / "sub" / "password").write_text("secret")
    (volume / "..data_tmp").symlink_to("..2020_01_01_00_00_00.1")
    assert not write_payload(volume, FILES)
    assert len(copies(volume)) == 1


@pytest.mark.parametrize("path", ["./a", "a/", "a//", ".//a", "b//a", "b/./a", "./b/a/"])
def test_a_path_may_be_written_in_more_than_one_way(volume, path):
    assert write_payload(volume, {path: File(b"x", 0o644)})
    place = volume / "b" / "a" if "b" in path else volume / "a"
    assert place.read_bytes() == b"x"
    assert not write_payload(volume, {path: File(b"x", 0o644)})


@pytest.mark.parametrize("path", [".", "./", "./..data", "./..x", "a/./..", "//a", "/"])
def test_a_path_that_would_be_none_of_the_volumes_files_is_refused(volume, path):
    with pytest.raises(InvalidRequest, match="no path"):
        write_payload(volume, {path: File(b"", 0o644)})
    assert list(volume.iterdir()) == []


def test_a_file_cannot_be_a_directory_as_well(volume):
    with pytest.raises(InvalidRequest, match="'a/b' cannot be a file, for 'a/b/c/d' lies below it"):
        write_payload(volume, {"a/b/c/d": File(b"", 0o644), "a/./b": File(b"", 0o644)})
    assert list(volume.iterdir()) == []


def test_of_two_that_are_one_path_the_last_counts(volume):
    assert write_payload(volume, {"b/a": File(b"1", 0o644), "b//a": File(b"2", 0o644)})
    assert (volume / "b" / "a").read_bytes() == b"2"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a/" * 2048 + "b", "'a/.*…' is longer than 4096 bytes"),
        ("a/" * 500_000 + "b", "'a/.*…' is longer than 4096 bytes"),
        ("a/" + "b" * 256, "has a name of more than 255 bytes"),
        ("ä" * 128, "has a name of more than 255 bytes"),
    ],
)
def test_a_path_that_no_kubelet_takes_is_refused_in_few_words(volume, path, words):
    with pytest.raises(InvalidRequest, match=words) as raised:
        write_payload(volume, {path: File(b"", 0o644)})
    assert len(str(raised.value)) < 400
    assert list(volume.iterdir()) == []


def test_the_longest_names_are_taken(volume):
    path = "/".join(["n" * 255] * 3)
    assert write_payload(volume, {path: File(b"x", 0o644)})
    assert (volume / path).read_bytes() == b"x"


def below(volume, parts):
    """What is in a directory that is too deep to have a path."""
    fd = os.open(volume, os.O_RDONLY)
    for part in parts:
        above, fd = fd, os.open(part, os.O_RDONLY, dir_fd=fd)
        os.close(above)
    try:
        return sorted(os.listdir(fd))
    finally:
        os.close(fd)


def test_each_directory_is_entered_once_however_deep_it_is(volume, monkeypatch):
    depth = 2000
    deep = {"a/" * depth + name: File(b"x", 0o644) for name in "xyz"}
    aside = {"a/" * half + "b": File(b"y", 0o644) for half in range(1, depth, 100)}
    entered, opened = [0], os.open

    def counted(path, flags, *args, **more):
        entered[0] += bool(flags & os.O_DIRECTORY)
        return opened(path, flags, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(payload.os, "open", counted)
        assert write_payload(volume, deep | aside)
        assert not write_payload(volume, aside | deep)
    assert below(volume, ["..data", *["a"] * depth]) == ["x", "y", "z"]
    assert entered[0] < 5 * depth  # down and up again, twice
    assert write_payload(volume, {})  # which removes them


@pytest.mark.parametrize("place", ["", "sub", "sub/deep"])
@pytest.mark.parametrize("is_more", [True, False])
def test_a_name_more_or_less_anywhere_is_made_good(volume, place, is_more):
    files = {path: File(b"x", 0o644) for path in ("a", "z", "sub/a", "sub/z", "sub/deep/a", "sub/deep/z")}
    assert write_payload(volume, files)
    held = volume / "..data" / place
    if is_more:
        (held / "more").touch()
    else:
        (held / "z").unlink()
    assert write_payload(volume, files)
    assert sorted(os.listdir(volume / "..data" / place)) == sorted(
        {"a", "z", *{"": ["sub"], "sub": ["deep"]}.get(place, [])}
    )
    assert not write_payload(volume, files)


def test_a_file_may_have_another_owner_than_the_agent(volume):
    uid = os.getuid()
    file = File(b"x", 0o600, uid)
    assert write_payload(volume, {"a": file})
    assert (volume / "a").stat().st_uid == uid
    assert not write_payload(volume, {"a": file})
