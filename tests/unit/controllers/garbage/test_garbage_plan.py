"""Owners and dependents: who goes, who waits, who stays."""

import pytest

from moorage.controllers.garbage.graph import FOREGROUND, ORPHAN, Graph, Node
from moorage.controllers.garbage.plan import (
    Action,
    Delete,
    Disown,
    DropOwners,
    Finish,
    LookAt,
    OwnerState,
    plan_node,
)
from moorage.kube.objects.meta import OwnerReference, Resource

THINGS = Resource("", "v1", "things", "Thing", True)


def node(uid: str, *owners: str, finalizers: tuple[str, ...] = (), leaving: bool = False, blocks: bool = True) -> Node:
    references = tuple(OwnerReference(uid=owner, kind="Thing", block_owner_deletion=blocks) for owner in owners)
    return Node(THINGS, "default", uid, uid, "1", references, finalizers, leaving)


CHILD = node("child", "owner")
CASES: dict[str, tuple[Node, dict[str, OwnerState], list[Node], list[Action]]] = {
    "its owner is there": (CHILD, {"owner": "there"}, [], []),
    "its owner cannot be known": (CHILD, {"owner": "unknown"}, [], []),
    "its owner is gone": (CHILD, {"owner": "gone"}, [], [Delete("Background")]),
    "its owner waits for it": (CHILD, {"owner": "waiting"}, [], [Delete("Background")]),
    "its owner waits for it, and others depend on it": (
        CHILD,
        {"owner": "waiting"},
        [node("grandchild", "child")],
        [Delete("Foreground")],
    ),
    "one of two owners is gone": (
        node("child", "a", "b"),
        {"a": "gone", "b": "there"},
        [],
        [DropOwners(frozenset({"a"}))],
    ),
    "it owns and is owned by nobody": (node("free"), {}, [node("x", "free")], []),
    "it is on its way": (node("child", "owner", leaving=True), {"owner": "gone"}, [], []),
    "it leaves orphans": (
        node("owner", finalizers=(ORPHAN,), leaving=True),
        {},
        [CHILD],
        [Disown(CHILD)],
    ),
    "it has left its orphans": (node("owner", finalizers=(ORPHAN,), leaving=True), {}, [], [Finish(ORPHAN)]),
    "it waits for what blocks it": (
        node("owner", finalizers=(FOREGROUND,), leaving=True),
        {},
        [CHILD, node("going", "owner", leaving=True)],
        [LookAt("child")],
    ),
    "nothing blocks it": (
        node("owner", finalizers=(FOREGROUND,), leaving=True),
        {},
        [node("child", "owner", blocks=False)],
        [Finish(FOREGROUND)],
    ),
    "a finalizer says how its own are treated": (
        node("child", "owner", finalizers=(ORPHAN,)),
        {"owner": "gone"},
        [],
        [Delete("Orphan")],
    ),
}


@pytest.mark.parametrize(("one", "owners", "dependents", "expected"), CASES.values(), ids=CASES)
def test_what_is_done_about_an_object(
    one: Node, owners: dict[str, OwnerState], dependents: list[Node], expected: list[Action]
) -> None:
    assert plan_node(one, owners, dependents) == expected


def test_a_change_concerns_those_above_and_below() -> None:
    graph = Graph()
    assert graph.see(None, CHILD) == {"child"}  # the owner is not known yet
    owner = node("owner")
    graph.see(None, owner)
    assert graph.dependents("owner") == [CHILD]
    waiting = node("owner", finalizers=(FOREGROUND,), leaving=True)
    assert graph.see(owner, waiting) == {"owner", "child"}
    assert graph.see(CHILD, None) == {"owner"}
    assert graph.see(waiting, None) == set()
    assert graph.dependents("owner") == []


def test_the_end_of_an_owner_concerns_its_dependents() -> None:
    graph = Graph()
    owner = node("owner")
    graph.see(None, owner)
    graph.see(None, CHILD)
    assert graph.see(owner, None) == {"child"}
    assert graph.node("owner") is None
