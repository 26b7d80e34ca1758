"""The plugin's process proper: `python -m moorage.plugin SETTINGS`, settings as JSON.

Owns: starting with as little in memory as possible. `moorage plugin` parses its flags and then becomes
this program, which knows nothing of command lines; a plugin runs on every node, and small counts.
Start reading at: `main`; then `run`.
"""

import sys

# asyncio takes TLS along when it can find it. The plugin speaks over a unix socket only, and
# plain HTTP for metrics; without it the process is 5 MiB smaller.
sys.modules["ssl"] = None  # type: ignore[assignment]

import asyncio  # noqa: E402

from moorage import log  # noqa: E402
from moorage.errors import MoorageError  # noqa: E402
from moorage.plugin.run import run  # noqa: E402
from moorage.plugin.settings import PluginSettings  # noqa: E402
from moorage.printable import one_line  # noqa: E402


def main(argv: list[str]) -> int:
    """Serve until told to stop; an error is a sentence and exit status 1."""
    level, style, text = argv
    log.configure(level, style)
    settings = PluginSettings.from_json(text)
    try:
        asyncio.run(run(settings))
    except MoorageError as error:
        sys.stderr.write(one_line(f"Error: {error}") + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
