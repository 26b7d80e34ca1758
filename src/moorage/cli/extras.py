"""What each command needs beyond the bare installation.

Owns: the modules that each extra of pyproject.toml installs, and which commands import them. A command checks before it
starts, because it would otherwise fail halfway, in a sentence about a module.
Start reading at: `require`.
"""

import importlib.util

from moorage.errors import MoorageError

EXTRAS = {
    "apiserver": ("cel_expr_python", "cryptography", "jwt", "re2", "uvloop"),
    "controllers": ("uvloop",),
    "node": ("asyncinotify", "cryptography", "uvloop"),
    "ui": ("jinja2",),
    "volume": ("cryptography",),
}
NEEDS = {
    "apiserver": ("apiserver",),
    "controllers": ("controllers",),
    "demo": tuple(EXTRAS),
    "driver run": tuple(EXTRAS),
    "node": ("node",),
    "sidecars": ("controllers",),
    "ui": ("ui",),
    "up": tuple(EXTRAS),
    "volume export": ("volume",),
    "volume import": ("volume",),
}


class ExtraMissing(MoorageError):
    """This installation lacks the packages of a command."""

    code = "UNIMPLEMENTED"
    retryable = False


def require(command: str) -> None:
    """Raises ExtraMissing, which says what to install, if a package that `command` imports is missing."""
    needed = {module for extra in NEEDS.get(command, ()) for module in EXTRAS[extra]}
    if missing := sorted(name for name in needed if importlib.util.find_spec(name) is None):
        raise ExtraMissing(
            f"`moorage {command}` needs packages that are not installed ({', '.join(missing)}): "
            'run pip install "moorage[all]"'
        )
