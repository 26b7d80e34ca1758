"""Selectors against a naive model, the text forms kubectl writes, and node affinity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.kube.objects.meta import LabelSelector, NodeSelector, NodeSelectorTerm, Requirement
from moorage.kube.selectors import BadSelector, FieldMatch, LabelMatch, node_matches, term_matches, value_at

KEYS = ["app", "tier", "example.com/zone", "size"]
VALUES = ["", "a", "b", "c-1", "5", "17"]
labels = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES))
setwise = st.builds(
    lambda key, operator, values: Requirement(key=key, operator=operator, values=values),
    st.sampled_from(KEYS),
    st.sampled_from(["In", "NotIn"]),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=3, unique=True).map(sorted),
)
presence = st.builds(
    lambda key, operator: Requirement(key=key, operator=operator),
    st.sampled_from(KEYS),
    st.sampled_from(["Exists", "DoesNotExist"]),
)
order = st.builds(
    lambda key, operator, than: Requirement(key=key, operator=operator, values=[str(than)]),
    st.sampled_from(KEYS),
    st.sampled_from(["Gt", "Lt"]),
    st.integers(-3, 20),
)
requirements = st.lists(st.one_of(setwise, presence, order), max_size=4)


def naive(requirement, have):
    """What the documentation says, in as many words."""
    key, values = requirement.key, requirement.values
    return {
        "In": lambda: key in have and have[key] in values,
        "NotIn": lambda: key not in have or have[key] not in values,
        "Exists": lambda: key in have,
        "DoesNotExist": lambda: key not in have,
        "Gt": lambda: have.get(key, "").isdigit() and int(have[key]) > int(values[0]),
        "Lt": lambda: have.get(key, "").isdigit() and int(have[key]) < int(values[0]),
    }[requirement.operator]()


@given(requirements, labels)
def test_a_selector_matches_what_all_its_requirements_match(wanted, have):
    assert LabelMatch(tuple(wanted)).matches(have) == all(naive(one, have) for one in wanted)


@given(requirements, labels)
def test_the_text_of_a_selector_means_the_same(wanted, have):
    match = LabelMatch(tuple(wanted))
    again = LabelMatch.parse(match.text())
    assert again.matches(have) == match.matches(have)
    assert LabelMatch.parse(again.text()) == again


@given(labels, st.lists(st.one_of(setwise, presence), max_size=3), labels)
def test_the_object_form_is_the_conjunction_of_both_its_parts(pairs, expressions, have):
    selector = LabelSelector(match_labels=pairs, match_expressions=expressions)
    expected = all(have.get(key) == value for key, value in pairs.items()) and all(naive(e, have) for e in expressions)
    assert LabelMatch.of(selector).matches(have) == expected


@pytest.mark.parametrize(
    ("text", "have", "expected"),
    [
        ("", {}, True),
        ("a=b", {"a": "b"}, True),
        ("a==b", {"a": "c"}, False),
        (" a = b , c != d ", {"a": "b"}, True),
        ("a=", {"a": ""}, True),
        ("a=", {}, False),
        ("a!=b", {}, True),
        ("a in (b, c)", {"a": "c"}, True),
        ("a in (b)", {}, False),
        ("a notin (b,c),d", {"d": ""}, True),
        ("a in (,b)", {"a": ""}, True),
        ("!a", {}, True),
        ("! a", {"a": "x"}, False),
        ("a>5", {"a": "10"}, True),
        ("a>5", {"a": "1_0"}, False),
        ("a>5", {"a": "٩"}, False),
        ("a<5", {}, False),
        ("x.io/a in (b),x.io/c", {"x.io/a": "b", "x.io/c": ""}, True),
    ],
)
def test_the_text_forms_of_kubectl(text, have, expected):
    assert LabelMatch.parse(text).matches(have) is expected


@pytest.mark.parametrize(
    "text",
    [
        "=b",
        "a=b=c",
        "a in b",
        "a in (b",
        "a in b)",
        "a,,b",
        "a,",
        ",a",
        "a b",
        "a=b c",
        "!a=b",
        "a>x",
        "-a",
        "a/b/c",
        "/a",
    ]
    + ["a=" + "x" * 64, "x" * 64, "A.io/x", "a=-b", "a in (b c)"],
)
def test_what_is_no_selector_is_refused(text):
    with pytest.raises(BadSelector):
        LabelMatch.parse(text)


@given(st.text(max_size=30))
def test_any_text_is_a_selector_or_refused(text):
    try:
        LabelMatch.parse(text).matches({"a": "b"})
    except BadSelector:
        return


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("spec.nodeName=n1", True),
        ("spec.nodeName==n1,status.phase!=Running", True),
        ("spec.nodeName!=n1", False),
        ("status.phase=", True),
        ("spec.flag=true", True),
        (r"spec.odd=a\,b\=c\\d", True),
        ("spec.count=3", True),
    ],
)
def test_field_selectors(text, expected):
    document = {"spec": {"nodeName": "n1", "flag": True, "odd": "a,b=c\\d", "count": 3}}
    assert FieldMatch.parse(text).matches(lambda path: value_at(document, path)) is expected


@pytest.mark.parametrize("text", ["a", "=b", "a>b", "a=b=c", "a b=c"])
def test_what_is_no_field_selector_is_refused(text):
    with pytest.raises(BadSelector):
        FieldMatch.parse(text)


def _term(*expressions, fields=()):
    return NodeSelectorTerm(match_expressions=list(expressions), match_fields=list(fields))


@given(st.lists(st.lists(st.one_of(setwise, presence, order), max_size=3), max_size=3), labels)
def test_a_node_selector_is_the_disjunction_of_its_terms(terms, have):
    selector = NodeSelector(node_selector_terms=[_term(*term) for term in terms])
    expected = any(term and all(naive(one, have) for one in term) for term in terms)
    assert node_matches(selector, have, "n1") == expected


def test_an_absent_selector_fits_all_and_an_empty_term_none():
    assert node_matches(None, {}, "n1")
    assert not node_matches(NodeSelector(), {}, "n1")
    assert not term_matches(NodeSelectorTerm(), {}, "n1")


def test_a_node_can_be_asked_for_by_name():
    named = Requirement(key="metadata.name", operator="In", values=["n1"])
    assert term_matches(_term(fields=[named]), {}, "n1")
    assert not term_matches(_term(fields=[named]), {}, "n2")
    zone = Requirement(key="zone", operator="In", values=["a"])
    assert not term_matches(_term(zone, fields=[named]), {"zone": "b"}, "n1")
