"""Programs of the repository that are not part of the package, loaded as modules."""

import importlib.util
from pathlib import Path
from typing import Any


def load_script(path: Path) -> Any:
    """Return the program at `path` as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
