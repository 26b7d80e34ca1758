"""CEL rules: those of the snapshot kinds are evaluated, and what is not understood is never guessed at."""

import pytest

from moorage.apiserver.crd.cel import BadExpression, Rule
from moorage.apiserver.kinds.snapshot_crds import snapshot_definitions

ONE_OF = "(has(self.a) && !has(self.b)) || (!has(self.a) && has(self.b))"


def _rules(node):
    if isinstance(node, dict):
        yield from (rule["rule"] for rule in node.get("x-kubernetes-validations") or [])
        for child in node.values():
            yield from _rules(child)
    elif isinstance(node, list):
        for child in node:
            yield from _rules(child)


def test_every_rule_of_the_snapshot_kinds_is_understood():
    found = {rule for definition in snapshot_definitions() for rule in _rules(definition)}
    assert found
    assert all(Rule.compile(rule, "").text == rule for rule in found)


@pytest.mark.parametrize(
    ("rule", "new", "old", "holds"),
    [
        ("self == oldSelf", "a", "a", True),
        ("self == oldSelf", "a", "b", False),
        ("size(self) > 0", "", "", False),
        ("has(self.name) && has(self.__namespace__)", {"name": "a", "namespace": "b"}, {}, True),
        ("has(self.name) && has(self.__namespace__)", {"name": "a"}, {}, False),
        ("self.__namespace__ == oldSelf.__namespace__", {"namespace": "a"}, {"namespace": "b"}, False),
        ("!has(oldSelf.uid) || (has(self.uid) && self.uid == oldSelf.uid)", {"uid": "1"}, {}, True),
        ("!has(oldSelf.uid) || (has(self.uid) && self.uid == oldSelf.uid)", {}, {"uid": "1"}, False),
        (ONE_OF, {"a": 1}, {}, True),
        (ONE_OF, {"a": 1, "b": 1}, {}, False),
        ("self.all(x, x.exists(y, y == 'k'))", [["k"], ["l", "k"]], [], True),
        ("self.filter(x, x > 1).size() == 1", [1, 2], [], True),
    ],
)
def test_rules_of_the_official_definitions_hold_and_break(rule, new, old, holds):
    assert Rule.compile(rule, "").holds(new, old) is holds


@pytest.mark.parametrize(
    "rule",
    ["sets.contains(self, [1])", "quantity(self).isLessThan(quantity('1Gi'))", "self.?a.orValue(1) == 1", "x == 1",
     "type(self) == string", "self.all(k, v, v > 1)", "isURL(self)", "duration(self) < duration('1s')", "1u == 2u",
     "self.all(x, x > 0) && x == 1"],
)  # fmt: skip
def test_what_is_not_understood_is_refused_when_it_is_read(rule):
    with pytest.raises(BadExpression):
        Rule.compile(rule, "")
