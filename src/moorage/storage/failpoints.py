"""Named steps at which a test can stop or kill an operation.

Owns: one hook. In production it is None and a step costs one comparison.
May not touch: anything else.
"""

from collections.abc import Callable

_hook: Callable[[str], None] | None = None


def reached(step: str) -> None:
    """Say that an operation is at `step`; a test's hook may raise here or kill the process."""
    if _hook is not None:
        _hook(step)


def install(hook: Callable[[str], None] | None) -> None:
    """Set or remove the hook; for tests only."""
    global _hook
    _hook = hook
