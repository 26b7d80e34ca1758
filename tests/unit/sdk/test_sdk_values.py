"""Sizes and the durable store."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage import sdk
from moorage.sdk import Driver, InvalidArgument, OutOfRange, SizeRange, Store, backends


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(1, 1 << 30), st.integers(0, 1 << 40))
def test_a_chosen_size_suits_the_request_or_is_refused(required, limit, step, least):
    if limit and limit < required:
        return
    size = SizeRange(required, limit)
    try:
        chosen = size.choose(default=1 << 30, step=step, least=least)
    except OutOfRange:
        assert limit
    else:
        assert size.admits(chosen)
        assert chosen % step == 0
        assert chosen >= least


def test_a_driver_has_a_largest_size():
    with pytest.raises(OutOfRange, match="largest volume"):
        SizeRange(required=100).choose(default=1, most=99)


@settings(deadline=None)  # each example syncs files to a disk that others use
@given(st.dictionaries(st.text(min_size=1, max_size=20).filter(lambda key: len(key.encode()) < 70), st.integers()))
def test_every_key_is_found_again(tmp_path_factory, documents):
    directory = tmp_path_factory.mktemp("store")
    store = Store(directory)
    for key, value in documents.items():
        store.put(key, {"value": value})
    store.close()
    store = Store(directory)
    assert dict(store.items()) == {key: {"value": value} for key, value in documents.items()}
    assert all(path.parent == directory for path in directory.iterdir())
    for key in documents:
        store.delete(key)
    assert list(store.keys()) == []
    store.close()


@pytest.mark.parametrize("key", ["", "x" * 300])
def test_keys_that_cannot_be_a_file_are_refused(tmp_path, key):
    store = Store(tmp_path)
    with pytest.raises(InvalidArgument):
        store.put(key, {})
    store.close()


def test_a_killed_write_leaves_the_old_document(tmp_path):
    script = (
        "import os, sys\nfrom moorage.sdk import Store\n"
        "store = Store(sys.argv[1]); store.put('a', {'n': 1})\n"
        "os.rename = lambda *_: os._exit(9)\nstore.put('a', {'n': 2})\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 9
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")]
    store = Store(tmp_path)
    assert store.get("a") == {"n": 1}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    store.close()


def test_importing_the_library_loads_no_kubernetes_code():
    script = "import sys, moorage.sdk\nprint([name for name in sys.modules if name.startswith('moorage.kube')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_reference_names_all_that_is_public():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "driver-library.md").read_text()
    hooks = [name for name, member in vars(Driver).items() if inspect.isfunction(member) and name[0] != "_"]
    attributes = [name for name in Driver.__annotations__ if name[0] != "_"]
    helpers = [name for name, each in vars(backends).items() if getattr(each, "__module__", "") == backends.__name__]
    for name in {*sdk.__all__, *hooks, *attributes, *helpers} - {"main"}:
        assert re.search(rf"`{name}[`(]", page), name


def test_the_library_loads_nothing_of_kubernetes():
    program = "import sys, moorage.sdk, moorage.sdk.command; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert [
        name for name in loaded if name.startswith(("kubernetes", "moorage.kube", "moorage.apiserver", "aiohttp"))
    ] == []
