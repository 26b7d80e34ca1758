"""Coverage has a floor for each package: the script that compares names what fell below."""

from scripts import coverage


def file(covered: int, branches: int) -> dict:
    return {
        "summary": {
            "covered_lines": covered,
            "num_statements": 10,
            "covered_branches": branches,
            "num_branches": 10,
        }
    }


def test_statements_and_branches_of_a_package_are_added_up():
    report = {"files": {"src/moorage/host/loop.py": file(10, 0), "src/moorage/host/a/b.py": file(5, 5)}}
    report["files"]["src/moorage/log.py"] = file(10, 10)
    assert coverage.measured(report) == {"host": 50.0, "moorage": 100.0}


def test_what_fell_below_its_floor_or_has_none_is_named():
    assert coverage.compare({"host": 79.9, "kube": 90.0}, {"host": 80, "kube": 90}) == ["host: 79.9 % is below 80 %"]
    assert coverage.compare({"host": 79.9}, {}) == ["host: has no floor; 79 would hold"]
    assert coverage.compare({}, {"host": 80}) == ["host: has a floor, and no code was measured"]


def test_floors_are_of_packages_that_exist():
    packages = {path.name for path in (coverage.ROOT / "src/moorage").iterdir() if (path / "__init__.py").is_file()}
    assert coverage.floors().keys() <= packages | {"moorage"}
