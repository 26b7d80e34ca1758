"""Fuzz what parses text and bytes of API clients, guided by coverage.

    pip install atheris        # in an environment of its own; Moorage does not need it
    PYTHONPATH=src python scripts/fuzz.py yaml tests/security/corpus/yaml -max_total_time=600

The first argument is a target, the others go to libFuzzer. A target fails for an exception that is not a refusal. The
inputs in `tests/security/corpus` are replayed by a test, so a finding becomes a regression test when its file is there.
"""

import json
import runpy
import sys
from collections.abc import Callable
from typing import Any

from moorage.apiserver.crd.structural import Checker, default, prune, type_from
from moorage.apiserver.errors import StatusError
from moorage.apiserver.formats.decode import json_from, yaml_from
from moorage.apiserver.formats.protobuf import document_from
from moorage.apiserver.kinds.schema import struct
from moorage.apiserver.store.store import encode
from moorage.apiserver.writing.json_patch import json_patch, merge_patch
from moorage.apiserver.writing.managed_fields import fields_v1, leaves, merged, paths_from, remove
from moorage.apiserver.writing.strategic_patch import strategic_patch
from moorage.errors import InvalidRequest
from moorage.kube.quantity import Quantity
from moorage.kube.selectors import FieldMatch, LabelMatch

POD = struct("core.v1.Pod")
DOCUMENT: dict[str, Any] = {
    "metadata": {"name": "p", "labels": {"a": "b"}, "finalizers": ["x"]},
    "spec": {"containers": [{"name": "c", "env": [{"name": "A", "value": "1"}]}], "tolerations": [{"key": "k"}]},
}
# `Edge` answers these with 4xx.
REFUSALS = (StatusError, InvalidRequest, RecursionError, OverflowError, UnicodeEncodeError)


def _copy() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(DOCUMENT))
    return found


def patch(data: bytes) -> None:
    sent = json_from(data)
    encode(json_patch(_copy(), sent))


def merge(data: bytes) -> None:
    sent = json_from(data)
    once = merge_patch(_copy(), sent)
    assert encode(merge_patch(once, sent)) == encode(once)
    if isinstance(sent, dict):
        encode(strategic_patch(_copy(), sent, POD))


def yaml(data: bytes) -> None:
    encode(yaml_from(data))


def protobuf(data: bytes) -> None:
    encode(document_from(b"k8s\x00" + data))


def selector(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    try:
        match = LabelMatch.parse(text)
    except InvalidRequest:
        FieldMatch.parse(text)
        return
    assert LabelMatch.parse(str(match)).matches({"a": "b"}) == match.matches({"a": "b"})


def quantity(data: bytes) -> None:
    found = Quantity.parse(data.decode(errors="replace"))
    again = Quantity.parse(found.canonical())
    assert again.amount == found.amount, (found, again)


def fields(data: bytes) -> None:
    sent = json_from(data)
    paths = paths_from(sent)
    assert paths_from(fields_v1(paths)) == paths
    if isinstance(sent, dict):
        new = merged(_copy(), sent, POD)
        remove(new, POD, {*leaves(sent, POD), *paths})
        encode(new)


def schema(data: bytes) -> None:
    """A schema that the definition of a kind may have, and an object."""
    from moorage.apiserver.crd.definitions import _check_schema

    sent = json_from(data)
    if not isinstance(sent, list) or len(sent) != 2 or not isinstance(sent[0], dict):
        return
    if _check_schema("s", sent[0], 0):
        return
    kept = prune(sent[1], type_from(sent[0]), "", [])
    default(kept, sent[0])
    Checker().check(kept, sent[0], "")


TARGETS: dict[str, Callable[[bytes], None]] = {
    one.__name__: one for one in (patch, merge, yaml, protobuf, selector, quantity, fields, schema)
}


def run(name: str, data: bytes) -> None:
    """Give one input to a target. Raises what is not a refusal."""
    try:
        TARGETS[name](data)
    except REFUSALS:
        return


def main() -> None:
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    name, *arguments = sys.argv[1:]
    for module in [known for known in sys.modules if known.startswith("moorage")]:
        del sys.modules[module]
    with atheris.instrument_imports(include=["moorage"]):  # load it all again, with its branches counted
        instrumented = runpy.run_path(__file__)["run"]
    atheris.Setup([sys.argv[0], *arguments], lambda data: instrumented(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
