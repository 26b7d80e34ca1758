"""Another version of Moorage: this tree, changed in two places."""

import moorage

NEXT_VERSION = "9.9.0"
# What it does otherwise: it calls itself so, and keeps something in its records that this version does not know.
NEXT = {
    "src/moorage/__init__.py": (f'"{moorage.__version__}"', f'"{NEXT_VERSION}"'),
    "src/moorage/storage/records.py": (
        "    size_enforced: bool = True\n",
        "    size_enforced: bool = True\n"
        f'    written_by: str = msgspec.field(default_factory=lambda: "{NEXT_VERSION}")\n',
    ),
}
