"""Commands that Moorage suggests to its users, built from words.

Owns: quoting, and the word that a misspelt one was meant to be. A name from an object, a driver or a file is always a
single shell word, whatever it holds, and never an option.
Start reading at: `command`, `kubectl`, `did_you_mean`.
"""

import difflib
import shlex
from collections.abc import Iterable
from typing import Final, NewType

Command = NewType("Command", str)
"""A command to paste into a shell, or a sentence in which every name is quoted as for a shell."""

NOTHING: Final = Command("")
_LONGEST_WORD = 500  # twice the longest name of an object


def command(*words: str, names: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> Command:
    """Return a command. `names` come from objects; `flags` are options with their values."""
    is_odd = any(name.startswith("-") for name in names)  # after `--` no word is taken for an option
    rest = (*flags, "--", *names) if is_odd else (*names, *flags)
    return Command(shlex.join(map(_bounded, (*words, *rest))))


def kubectl(verb: str, kind: str = "", *names: str, namespace: str = "", flags: tuple[str, ...] = ()) -> Command:
    """Return a kubectl command; see `command` for `names` and `flags`."""
    kinds = [kind] if kind else []
    return command("kubectl", *in_namespace(namespace), verb, *kinds, names=names, flags=flags)


def in_namespace(name: str) -> list[str]:
    """Return the words that choose a namespace; none for an object without one."""
    if not name:
        return []
    return [f"--namespace={name}"] if name.startswith("-") else ["-n", name]


def pods_like(word: str) -> Command:
    """Return a command that lists the pods that hold a given word in their names or those of their containers.

    It prints the head of the table and succeeds also if there is no such pod.
    """
    columns = "NAMESPACE:.metadata.namespace,POD:.metadata.name,PHASE:.status.phase,CONTAINERS:.spec.containers[*].name"
    return Command(f"kubectl get pods -A -o 'custom-columns={columns}' | grep -i -e NAMESPACE -e {word}")


def saved(shown: Command, file: str) -> Command:
    """Return the command with its output written to a file of ours."""
    return Command(f"{shown} > {file}")


def in_words(sentence: str, *names: str) -> Command:
    """Return a sentence for what no command does; each name takes the place of one `{}`."""
    return Command(sentence.format(*(shlex.quote(_bounded(name)) for name in names)))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'NAME'?` if a known word is like this one, else nothing."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower()[:_LONGEST_WORD], by_lower, n=1)
    return f"; did you mean {by_lower[found[0]]!r}?" if found else ""


def _bounded(word: str) -> str:
    """Cut an overlong word. What is left cannot be the name of an object, because of its last character."""
    return word if len(word) <= _LONGEST_WORD else word[:_LONGEST_WORD] + "…"
