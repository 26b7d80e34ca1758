"""Write the generated parts of the documentation from the code that they describe.

A page marks a generated part with `<!-- generated: NAME -->` and `<!-- end -->`. Everything else is written by hand.
`python scripts/docs.py` rewrites the parts; `python scripts/docs.py --check` fails if one is out of date.
Start reading at: `PARTS`, `render`.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from prometheus_client import REGISTRY
from prometheus_client.core import Metric

from moorage.cli.app import (
    argument_usage,
    default_of,
    is_argument,
    is_completion,
    is_shown_option,
    option_names,
    parts_of,
    usage_of,
)
from moorage.cli.main import COMMANDS, app
from moorage.csi.metrics import CallMetrics
from moorage.insight import troubleshooting_page
from moorage.kube.control.queue import WorkQueue
from moorage.plugin import metrics as plugin_metrics
from moorage.plugin import parameters
from moorage.plugin.access import FILESYSTEMS
from moorage.sidecars import flags as sidecar_flags
from moorage.sidecars.metrics import Metrics
from moorage.sidecars.settings import duration_text
from moorage.storage import InUse, Pools, VolumeKind, tunables

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FIGURES = ROOT / "benchmarks" / "figures.json"
_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """Return a page with every generated part replaced by its current text."""

    def replaced(found: re.Match[str]) -> str:
        return f"{found[1]}\n{PARTS[found[2]]().strip()}\n\n{found[3]}"

    return _PART.sub(replaced, text)


def pages() -> dict[Path, str]:
    """Return every page that has a generated part, as it should be."""
    found = {path: path.read_text() for path in sorted(DOCS.rglob("*.md"))}
    whole = {DOCS / "reference" / "troubleshooting.md": troubleshooting_page.page()}
    return whole | {path: render(text) for path, text in found.items() if _PART.search(text)}


def stale() -> list[str]:
    """Return the names of the pages that differ from what the code says."""
    return [str(path.relative_to(ROOT)) for path, text in pages().items() if path.read_text() != text]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# --- commands ---


def cli() -> str:
    """The commands in the order of `moorage --help`, with every argument and option."""
    root = typer.main.get_command(app)
    parts = ["## Options before the command\n", _options(root)]
    for name, (module, summary) in COMMANDS.items():
        command = typer.main.get_command(importlib.import_module(module).app)
        if name == "sidecars":
            parts.append(f"## moorage {name}\n\n{summary} Its flags are listed in [sidecar flags](sidecar-flags.md).\n")
        else:
            parts.append(_command(f"moorage {name}", command, "##"))
    return "\n".join(parts)


def _command(path: str, command: Any, level: str) -> str:
    first, examples, rest = parts_of(command.help or command.short_help or "")
    parts = [f"{level} {path}\n", f"{_line(first)}\n", *(f"{_line(each)}\n" for each in rest)]
    parts.append("\n".join(["```console", *(f"$ {example}" for example in examples), "```"]) + "\n" if examples else "")
    parts.append(f"```\n{usage_of(command, path)}\n```\n")
    arguments = [(f"`{argument_usage(each)}`", each.help or "") for each in command.params if is_argument(each)]
    parts.append(table(("argument", "meaning"), arguments) + "\n" if arguments else "")
    parts.append(_options(command))
    parts += [_command(f"{path} {name}", each, level + "#") for name, each in getattr(command, "commands", {}).items()]
    return "\n".join(part for part in parts if part)


def _line(text: str) -> str:
    return " ".join(text.split())


def _options(command: Any) -> str:
    shown = [each for each in command.params if is_shown_option(each) and not is_completion(each)]
    rows = [(f"`{option_names(each)}`", _default(each), _about(each)) for each in shown]
    return table(("option", "default", "meaning"), rows) + "\n" if rows else ""


def _default(option: Any) -> str:
    if option.required:
        return "required"
    return f"`{default_of(option)}`" if default_of(option) else ""


def _about(option: Any) -> str:
    about = f"{option.help or ''} May be repeated." if option.multiple else option.help or ""
    return f"{about} Environment: `{option.envvar}`." if option.envvar else about


def flags() -> str:
    """Every flag of `moorage sidecars`, and those that are accepted and ignored."""
    rows = []
    for flag in sidecar_flags.all_flags():
        names = ", ".join(f"`--{name}`" for name in flag.names)
        rows.append((names, flag.kind, _flag_default(flag), flag.help))
    ignored = sorted(sidecar_flags.IGNORED | sidecar_flags.IGNORED_SWITCHES)
    accepted = ", ".join(f"`--{name}`" for name in ignored)
    return f"{table(('flag', 'kind', 'default', 'meaning'), rows)}\n\nAccepted and ignored: {accepted}."


def _flag_default(flag: sidecar_flags.Flag) -> str:
    if flag.default in ("", None):
        return ""
    if flag.kind == "duration":
        return f"`{duration_text(flag.default)}`"
    return f"`{str(flag.default).lower() if flag.kind == 'bool' else flag.default}`"


# --- parameters ---

_CLASS_PARAMETERS: dict[str, tuple[str, str]] = {
    "pool": ("a pool's name", "The pool for the volumes. The default is the pool called `default`, or the first one."),
    "kind": (
        " or ".join(f"`{each}`" for each in VolumeKind),
        "A file behind a loop device, or a directory. The default is `image`.",
    ),
    "fsType": (
        ", ".join(f"`{each}`" for each in FILESYSTEMS),
        "The filesystem of an image if the capability names none. The default is ext4, or xfs if the process lacks "
        "CAP_SYS_RESOURCE and so could not grow a mounted ext4. `csi.storage.k8s.io/fstype` is the same.",
    ),
    "provisioning": (
        "`thin` or `thick`",
        "`thick` allocates all blocks, and the volume stays thick. The default is `thin`.",
    ),
    "snapshotInUse": (
        ", ".join(f"`{each}`" for each in InUse),
        "What a snapshot or clone of a volume in use does if the pool has no reflinks: refuse (the default), freeze "
        "the volume for the length of the copy (bounded), or, for directories, copy file by file. A group snapshot "
        "is of one moment, so `live` is `refuse` there.",
    ),
}
_MUTABLE_PARAMETERS: dict[str, tuple[str, str]] = {
    tunables.DIRECT_IO: ("`true` (default), `false`", "Switched on the loop device at once."),
    tunables.READ_AHEAD: ("0 to 1048576", "Set on the loop device at once."),
    tunables.TRASH_RETENTION: (
        "a duration such as `12h` or `7d`",
        "How long the deleted volume can be brought back, in place of the plugin's `--trash-retention`; `0s` frees its "
        "space at once.",
    ),
    **{
        key: ("a whole number; 0 is no limit", "Set on the control groups of the pods that use the volume.")
        for key in tunables.IO_LIMITS
    },
}


def class_parameters() -> str:
    return _parameters(parameters.CLASS_KEYS, _CLASS_PARAMETERS)


def mutable_parameters() -> str:
    return _parameters(tunables.KEYS, _MUTABLE_PARAMETERS)


def _parameters(keys: Sequence[str], known: dict[str, tuple[str, str]]) -> str:
    if set(keys) != set(known):
        raise SystemExit(f"scripts/docs.py describes {sorted(known)}, but the code takes {sorted(keys)}")
    return table(("key", "values", "meaning"), [(f"`{key}`", *known[key]) for key in keys])


# --- metrics ---


class _OnePool:
    """A pool without a disk: enough to see which metrics a pool has, and their labels."""

    name = "default"

    def capacity(self) -> Any:
        return self

    def __getattr__(self, name: str) -> int:
        return 0


def plugin_metrics_table() -> str:
    """What a scrape of the plugin returns."""
    calls = CallMetrics()
    calls.observe("driver", "method", "OK", 1)
    pools = plugin_metrics.pool_metrics(Pools({"default": _OnePool()}, "default"))  # type: ignore[dict-item]
    text = pools + plugin_metrics.copy_metrics({"reflink": 1}) + calls.render()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    labels = {name: sample for name, sample in re.findall(r"^(\w+?)(?:_count)?\{([^}]*)\}", text, re.M)}
    rows = [
        (f"`{name}`", kinds[name], ", ".join(re.findall(r'(\w+)="', labels.get(name, ""))), about)
        for name, about in re.findall(r"^# HELP (\S+) (.*)$", text, re.M)
    ]
    return table(("metric", "kind", "labels", "meaning"), rows)


def sidecar_metrics_table() -> str:
    """What a scrape of the sidecars returns beside what every Python process has."""
    return _registry_table([*_families(Metrics().registry)])


def shared_metrics_table() -> str:
    """What the sidecars and the controllers have in common."""
    queue = WorkQueue[str]("one")  # depth has labels only while there is a queue
    ours = ("workqueue_", "rest_client_", "leader_election_")
    found = sorted(each for each in _families(REGISTRY) if each[0].startswith(ours))
    del queue
    return _registry_table(found)


def _families(registry: Any) -> list[tuple[str, str, Sequence[str], str]]:
    found = {}
    for collector in list(registry._collector_to_names):
        labels = list(getattr(collector, "_labelnames", ()))
        for metric in collector.collect():
            found[metric.name] = (_name(metric), metric.type, labels or _labels(metric), metric.documentation)
    return list(found.values())


def _labels(metric: Metric) -> list[str]:
    return sorted({label for sample in metric.samples for label in sample.labels} - {"le"})


def _name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _registry_table(found: list[tuple[str, str, Sequence[str], str]]) -> str:
    rows = [(f"`{name}`", kind, ", ".join(labels), about) for name, kind, labels, about in found]
    return table(("metric", "kind", "labels", "meaning"), rows)


# --- figures ---


def figures() -> str:
    """The promises in `benchmarks/figures.json`, which `benchmarks/all.py --json` updates."""
    rows = []
    for each in json.loads(FIGURES.read_text()):
        measured = each["measured"] if each.get("met", True) else f"**{each['measured']}**"
        rows.append((each["promise"], each["bound"], measured, each["date"], f"`{each['command']}`"))
    return table(("promise", "bound", "measured", "date", "command"), rows)


def planted_bugs() -> str:
    """The bugs that the checks of drivers were proven with."""
    sys.path.insert(0, str(ROOT))  # the catalogue is part of the tests
    from tests.support.mutants.catalogue import MUTANTS

    rows = sorted((f"`{one.caught_by}`", one.bug, one.kind) for one in MUTANTS.values())
    return table(("found by", "bug", "named as"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "cli": cli,
    "sidecar-flags": flags,
    "class-parameters": class_parameters,
    "mutable-parameters": mutable_parameters,
    "plugin-metrics": plugin_metrics_table,
    "sidecar-metrics": sidecar_metrics_table,
    "shared-metrics": shared_metrics_table,
    "figures": figures,
    "planted-bugs": planted_bugs,
}


def main(arguments: Sequence[str]) -> int:
    if "--check" in arguments:
        for name in (found := stale()):
            print(f"{name} is out of date; run: make docs")
        return 1 if found else 0
    for path, text in pages().items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
