"""Alert rules and dashboard name only metrics that exist, and the page of metrics names all that do."""

import json
import re

import pytest
import yaml

from moorage.csi.metrics import CallMetrics
from moorage.kube.control.queue import WorkQueue
from moorage.plugin.metrics import copy_metrics, pool_metrics
from moorage.sidecars.metrics import Metrics
from moorage.storage import Pools

# Not ours: Prometheus' own, and what the kubelet measures of volumes that pods use.
OTHERS = {
    "up",
    *(f"kubelet_volume_stats_{what}" for what in ("capacity_bytes", "used_bytes", "available_bytes")),
    *(f"kubelet_volume_stats_{what}" for what in ("inodes", "inodes_used")),
}
KEYWORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring"}


def families(page: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.M))


@pytest.fixture
def existing() -> set[str]:
    """The names that a scrape of the plugin and of the sidecars returns."""
    WorkQueue("one")  # queues are counted when there are any
    plugin = CallMetrics().render() + pool_metrics(Pools({}, "")) + copy_metrics({})
    found = {**families(plugin), **families(Metrics().page().decode())}
    names = set(found)
    for name, kind in found.items():
        if kind == "histogram":
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return names


def metrics_in(expression: str) -> set[str]:
    text = re.sub(r'"[^"]*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", "", text)
    return set(re.findall(r"\b([a-z_:][a-z0-9_:]*)\b(?!\s*\()", text)) - KEYWORDS


def rules(deploy_folder) -> list[dict]:
    document = yaml.safe_load((deploy_folder / "monitoring/alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_metrics_are_found_in_an_expression():
    assert metrics_in('sum by (a) (rate(x_total{b="c"}[5m])) > 0.1 * y_bytes') == {"x_total", "y_bytes"}


def test_every_alert_is_on_metrics_that_exist_and_says_what_to_do(deploy_folder, existing):
    found = rules(deploy_folder)
    assert len({rule["alert"] for rule in found}) == len(found) >= 8
    for rule in found:
        used = metrics_in(rule["expr"])
        assert used, rule["alert"]
        assert used <= existing | OTHERS, f"{rule['alert']}: {used - existing - OTHERS}"
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_every_panel_is_on_metrics_that_exist(deploy_folder, existing):
    board = json.loads((deploy_folder / "monitoring/dashboard.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        for target in panel["targets"]:
            used = metrics_in(target["expr"])
            assert used, panel["title"]
            assert used <= existing | OTHERS, f"{panel['title']}: {used - existing - OTHERS}"


def test_the_page_of_metrics_has_every_metric(deploy_folder, existing):
    page = (deploy_folder.parent / "docs/reference/metrics.md").read_text()
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in existing if not name.endswith("_created")}
    missing = {name for name in names if not name.startswith(("process_", "python_")) and f"`{name}`" not in page}
    assert not missing
