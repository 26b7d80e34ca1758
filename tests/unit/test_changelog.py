"""Fragments in `changes/` become a section of the changelog."""

import pytest
from scripts import changelog


def test_every_fragment_of_the_repository_has_a_kind():
    changelog.fragments(changelog.ROOT / "changes")


def test_fragments_are_ordered_by_kind_and_name(tmp_path):
    (tmp_path / "README.md").write_text("not a change")
    (tmp_path / "b.fixed.md").write_text("A fix.\n")
    (tmp_path / "z.added.md").write_text("Last\nof the new.\n")
    (tmp_path / "a.added.md").write_text("New.\n")
    assert changelog.section(tmp_path) == "### Added\n\n- New.\n- Last\n  of the new.\n\n### Fixed\n\n- A fix.\n"


def test_a_fragment_without_a_kind_is_refused(tmp_path):
    (tmp_path / "a.md").write_text("What is this?")
    with pytest.raises(SystemExit, match=r"NAME\.KIND\.md"):
        changelog.section(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# Changelog\n\n## 1.0 (old)\n\nX\n", "# Changelog\n\n## 2.0 (now)\n\nBody\n\n## 1.0 (old)\n\nX\n"),
        ("# Changelog\n\n## 2.0 (unreleased)\n\nFirst.\n", "# Changelog\n\n## 2.0 (now)\n\nFirst.\n\nBody\n"),
    ],
)
def test_a_release_is_on_top_or_completes_the_unreleased_section(before, after):
    assert changelog.released(before, "2.0", "now", "Body\n") == after
