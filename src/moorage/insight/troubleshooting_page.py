"""docs/troubleshooting.md, from the same table of causes that `moorage explain` uses.

Owns: the page's text. A test fails if the page is stale. To rewrite it:
`python -m moorage.insight.troubleshooting_page docs/troubleshooting.md`.
May not touch: the cluster.
Start reading at: `page`.
"""

import sys
from pathlib import Path

from moorage.errors import UsageError
from moorage.insight.causes import REGISTRY, Cause
from moorage.kube.objects import (
    KubeObject,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    VolumeAttachment,
    VolumeSnapshot,
)

_KINDS: dict[type[KubeObject], tuple[str, str]] = {
    PersistentVolumeClaim: ("Claims", "pvc/NAME"),
    Pod: ("Pods", "pod/NAME"),
    PersistentVolume: ("Volumes", "pv/NAME"),
    VolumeAttachment: ("Attachments", "va/NAME"),
    VolumeSnapshot: ("Snapshots", "snapshot/NAME"),
    Node: ("Nodes", "node/NAME"),
}
_HEAD = """\
# Troubleshooting

<!-- Made by `python -m moorage.insight.troubleshooting_page docs/troubleshooting.md`; do not edit by hand. -->

Ask first:

```console
$ moorage explain                     # everything that is stuck
$ moorage explain pvc/data -n shop    # one object: why, what it waits for, the evidence, one next step
$ moorage trace pvc/data -n shop      # what happened to it, who did it, where the time went
```

Both only read, and work on any cluster that a kubeconfig leads to. Below is every cause that `explain` knows, {count}
of them, in the order in which they are tried: the first that holds is the answer. `explain -o json` names a cause by
its id.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD.format(count=len(REGISTRY))]
    parts.append("\n".join(_contents()) + "\n")
    for kind, (title, example) in _KINDS.items():
        parts.append(f"## {title}\n\n`moorage explain {example}`\n")
        parts += [_entry(cause) for cause in REGISTRY if cause.about is kind]
    return "\n".join(parts)


def _contents() -> list[str]:
    lines = []
    for kind, (title, _) in _KINDS.items():
        causes = [cause for cause in REGISTRY if cause.about is kind]
        lines.append(f"- [{title}](#{title.lower()}): {len(causes)} causes")
    return lines


def _entry(cause: Cause) -> str:
    return f"### {cause.title}\n\nCause `{cause.id}`. {cause.why}\n\n**What to do.** {cause.remedy}\n"


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UsageError("give the file to write, such as docs/troubleshooting.md")
    Path(arguments[0]).write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
