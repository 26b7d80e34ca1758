"""The rules, one module for each subject. Importing a module registers its checks.

Owns: `load`, and the order in which the subjects are listed.
"""

import importlib

MODULES = (
    "identity",
    "basics",
    "arguments",
    "volumes",
    "lists",
    "capacity",
    "attaching",
    "snapshots",
    "groups",
    "growing",
    "node",
    "data",
    "races",
    "restart",
    "changed_blocks",
    "answers",
)


def load() -> None:
    """Register every check."""
    for name in MODULES:
        importlib.import_module(f"moorage.conformance.checks.{name}")
