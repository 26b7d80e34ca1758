"""Replay the inputs that fuzzing found worth keeping; `scripts/fuzz.py` looks for more."""

from pathlib import Path

import pytest
from tests.support.scripts import load_script

CORPUS = Path(__file__).parent / "corpus"
fuzz = load_script(Path(__file__).parents[2] / "scripts" / "fuzz.py")


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_input_is_read_or_refused(path):
    fuzz.run(path.parent.name, path.read_bytes())


def test_every_target_has_inputs_and_every_input_a_target():
    assert {path.name for path in CORPUS.iterdir()} == set(fuzz.TARGETS)
