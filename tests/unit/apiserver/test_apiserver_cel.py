"""CEL rules are evaluated as Kubernetes does, and a rule that does not compile is never skipped."""

import pytest

from moorage.apiserver.crd.cel import ABSENT, BadRule, Rule, RuleFailed, cel_value, escaped
from moorage.apiserver.crd.rule_process import has_programs
from moorage.apiserver.crd.rules import compile_schema
from moorage.apiserver.kinds.snapshot_crds import snapshot_definitions

ONE_OF = "(has(self.a) && !has(self.b)) || (!has(self.a) && has(self.b))"
OBJECT = {"type": "object", "properties": {"a": {}, "name": {}, "namespace": {}}}


def _holds(rule, new, old=ABSENT, schema=None, **more):
    schema = schema or (OBJECT if isinstance(new, dict) else {})
    made = Rule.compile({"rule": rule, **more}, schema)
    return made.holds(cel_value(new, schema), old if old is ABSENT else cel_value(old, schema))


def test_every_rule_of_the_snapshot_kinds_compiles():
    schemas = [v["schema"]["openAPIV3Schema"] for d in snapshot_definitions() for v in d["spec"]["versions"]]
    assert any(has_programs(schema) for schema in schemas)
    errors = []
    for schema in schemas:
        compile_schema(schema, "", errors)
    assert errors == []


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
    assert _holds(rule, new, old) is holds


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("-7 / 2 == -3 && -7 % 2 == -1", 0),  # integers divide towards zero
        ("1 / 0 == 1 || true", 0),  # an error is absorbed by the side that decides
        ("true || self.a.b.c == 1", {"a": 1}),
        ("self > 1.5 && self < 3", 2),
        ("[1, 2, 2].isSorted() && ![2, 1].isSorted()", 0),
        ("self.sum() == 6 && self.min() == 1 && self.max() == 3 && self.indexOf(2) == 1", [1, 2, 3]),
        ("self.find('[0-9]+') == '12' && self.findAll('[0-9]').size() == 3 && self.findAll('[0-9]', 1) == ['1']",
         "a12b3"),
        ("sets.contains(self, [1]) && sets.equivalent(self, [2, 1]) && !sets.intersects(self, [3])", [1, 2]),
        ("quantity(self).isLessThan(quantity('2Gi')) && quantity(self) == quantity('1024Mi')", "1Gi"),
        ("quantity(self).add(quantity('1')).asInteger() == 11 && quantity(self).sub(3).compareTo(quantity('7')) == 0",
         "10"),
        ("!isQuantity(self) && isQuantity('1.5k')", "1x"),
        ("url(self).getHost() == 'a.example:80' && url(self).getPort() == '80' && url(self).getQuery()['q'] == ['1']",
         "https://a.example:80/p?q=1"),
        ("isURL('/absolute') && !isURL(self)", "not a url"),
        ("ip(self).family() == 4 && cidr('10.0.0.0/8').containsIP(self) && !isIP('10.0.0.256')", "10.1.2.3"),
        ("cidr('10.0.0.0/8').containsCIDR('10.1.0.0/16') && cidr(self).prefixLength() == 24", "10.0.0.0/24"),
        ("self.?a.orValue(1) == 1", {}),
        ("duration('1m') < duration('1h') && timestamp('2020-01-01T00:00:00Z').getFullYear() == 2020", 0),
        ("self.lowerAscii().split(',').join('-') == 'a-b' && self.matches('^A')", "A,B"),
        ("type(self) == string", "a"),
    ],
)  # fmt: skip
def test_a_rule_holds(rule, value):
    assert _holds(rule, value)


@pytest.mark.parametrize(
    "rule",
    ["self.isGreenish()", "greenish(self)", "x == 1", "self ==", "1 + 'a' == 2", "self.all(x, x > 0) && x == 1",
     "'a'", "self.all(k, v, v > 1)", "(" * 60 + "true" + ")" * 60, " ", "true)||(true"],
)  # fmt: skip
def test_a_rule_that_is_not_understood_does_not_compile(rule):
    with pytest.raises(BadRule):
        Rule.compile({"rule": rule}, {})


def test_scalar_types_are_checked_when_a_rule_is_compiled():
    with pytest.raises(BadRule):
        Rule.compile({"rule": "self > 3"}, {"type": "string"})


@pytest.mark.parametrize(
    "text", ["self.a.b == 1", "self.a", "self.a + 9223372036854775807 > 0", "self.a == 'x'.find('(')"]
)
def test_a_rule_without_a_verdict_fails(text):
    with pytest.raises(RuleFailed):
        _holds(text, {"a": 1})


def test_a_text_with_a_null_character_is_not_cut_at_it():
    with pytest.raises(RuleFailed):
        _holds("self == 'a'", "a\0b")


def test_formats_become_values_of_cel():
    assert _holds("self > duration('59s')", "1m", schema={"type": "string", "format": "duration"})
    assert _holds("self.getFullYear() == 2024", "2024-02-03", schema={"type": "string", "format": "date"})
    assert _holds("self == b'abc'", "YWJj", schema={"type": "string", "format": "byte"})
    assert _holds("self / 2.0 == 0.5", 1, schema={"type": "number"})


def test_an_optional_old_self_is_there_for_new_objects_too():
    rule = "oldSelf.hasValue() || self == 1"
    assert _holds(rule, 1, optionalOldSelf=True)
    assert not _holds(rule, 2, optionalOldSelf=True)
    assert _holds(rule, 2, 3, optionalOldSelf=True)
    assert _holds("oldSelf.orValue(0) < self", 1, optionalOldSelf=True)
    assert not _holds("oldSelf.orValue(0) < self", 1, 1, optionalOldSelf=True)
    with pytest.raises(BadRule):
        Rule.compile({"rule": "true), (true", "optionalOldSelf": True}, {})


def test_names_that_are_no_identifiers_are_escaped():
    assert [escaped(name) for name in ("a", "namespace", "a-b", "a.b/c", "a__b", "9", "é")] == [
        "a", "__namespace__", "a__dash__b", "a__dot__b__slash__c", "a__underscores__b", None, None,
    ]  # fmt: skip
