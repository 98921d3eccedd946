"""Dashboard and alerts ask for metrics that the service exports, in PromQL that a parser reads; all files are where
compose mounts them.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

import d3serve
from d3serve.api.edge import HTTPMetrics
from d3serve.api.metrics import QueueMetrics
from d3serve.store.records import LaneStats, QueueStats, WorkerInfo
from d3serve.store.tally import Counted

ROOT = Path(d3serve.__file__).parents[1]
FOLDER = ROOT / "deploy" / "monitoring"
PROMETHEUS = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())
RULES = yaml.safe_load((FOLDER / "prometheus" / "rules" / "d3serve.yml").read_text())
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "d3serve.json").read_text())
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
QUERIES = {
    **{name: rule["expr"] for name, rule in ALERTS.items()},
    **{
        f"{title} {target['refId']}": target["expr"].replace("$__rate_interval", "1m")
        for title, panel in PANELS.items()
        for target in panel["targets"]
    },
}
SCRAPED: dict[str, dict[str, set[str]]] = {"up": {}}  # Prometheus' own, of each scrape
GIVEN = {"job", "instance"}  # to every sample, by the scrape


def exported() -> dict[str, dict[str, set[str]]]:
    """Every sample that /metrics can have: its labels, and the values that each may take (none: any)."""
    lane = LaneStats(0, 0, 0, 0, 0.0)
    stats = QueueStats({"interactive": lane, "offline": lane}, 0, 1, 0.0, {}, {})
    worker = WorkerInfo("w", "h", 1, ("interactive",), True, "loaded", None, 1.0, None)
    http = CollectorRegistry()
    metrics = HTTPMetrics(http)
    metrics.requests.labels("GET", "/", 200).inc()
    metrics.seconds.labels("GET", "/").observe(1)
    found: dict[str, dict[str, set[str]]] = {}
    queue = QueueMetrics(stats, Counted.of({}, 0, 0.0), [worker])
    for family in (*queue.collect(), *http.collect()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                any_value = label in ("method", "route", "status") and sample.name.startswith("d3serve_http_")
                labels.setdefault(label, set()).update(() if any_value else (value,))
    return found


EXPORTED = exported()


def nodes(query: str, kind: type) -> list:
    """The parts of a query that are of this kind."""
    found: list = []
    promql_parser.walk(promql_parser.parse(query), found.append)
    return [node for node in found if isinstance(node, kind)]


def unknown(query: str) -> list[str]:
    """What a query asks for that is never exported: samples, labels, values of a label."""
    wrong = []
    for selector in nodes(query, promql_parser.VectorSelector):
        labels = (SCRAPED | EXPORTED).get(selector.name)
        if labels is None:
            wrong.append(selector.name)
            continue
        for matcher in selector.matchers.matchers:
            values = labels.get(matcher.name)
            exact = matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.NotEqual)
            if matcher.name not in {*labels, *GIVEN} or (exact and values and matcher.value not in values):
                wrong.append(f"{selector.name}{{{matcher.name}={matcher.value}}}")
    for aggregate in nodes(query, promql_parser.AggregateExpr):
        by = set(aggregate.modifier.labels) if aggregate.modifier else set()
        below = {label for each in nodes(str(aggregate.expr.prettify()), promql_parser.VectorSelector)
                 for label in (SCRAPED | EXPORTED).get(each.name, ())}  # fmt: skip
        wrong += [f"by {label}" for label in sorted(by - below)]
    return wrong


@pytest.mark.parametrize("name", QUERIES)
def test_every_metric_and_label_that_is_asked_for_is_exported(name):
    assert nodes(QUERIES[name], promql_parser.VectorSelector), "a query of nothing"
    assert unknown(QUERIES[name]) == []


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("max(d3serve_queue_depth)", ["d3serve_queue_depth"]),
        ("rate(d3serve_attempts[5m])", ["d3serve_attempts"]),
        ('d3serve_running_jobs{lane="offline"}', ["d3serve_running_jobs{lane=offline}"]),
        ('max(d3serve_attempts_total{kind="died"})', ["d3serve_attempts_total{kind=died}"]),
        ("max by (tenant) (d3serve_queue_queued_jobs)", ["by tenant"]),
    ],
)
def test_a_query_of_what_is_not_exported_is_seen(query, wrong):
    assert unknown(query) == wrong


@pytest.mark.parametrize("title", PANELS)
def test_a_legend_names_labels_that_its_query_keeps(title):
    for target in PANELS[title]["targets"]:
        query = target["expr"].replace("$__rate_interval", "1m")
        kept = [
            set(each.modifier.labels) for each in nodes(query, promql_parser.AggregateExpr) if each.modifier
        ]
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set().union(*kept)


def test_the_document_names_every_metric_and_alert_and_no_other():
    text = (ROOT / "docs" / "observability.md").read_text()
    families = {
        re.sub(r"_(bucket|count|sum)$", "", name) for name in EXPORTED if not name.endswith("_created")
    }
    assert set(re.findall(r"`(d3serve_\w+)`", text)) == families
    assert set(re.findall(r"`(D3serve\w+)`", text)) == ALERTS.keys()


def added_up(query: str) -> set[str]:
    """Samples that a query adds up over all processes that tell them."""
    sums = [each.expr for each in nodes(query, promql_parser.AggregateExpr) if str(each.op) == "sum"]
    straight = [each for each in sums if isinstance(each, promql_parser.Call | promql_parser.VectorSelector)]
    return {found.name for each in straight for found in nodes(each.prettify(), promql_parser.VectorSelector)}


@pytest.mark.parametrize("name", QUERIES)
def test_only_what_each_process_counts_for_itself_is_added_up(name):
    assert [each for each in added_up(QUERIES[name]) if not each.startswith("d3serve_http_")] == []


def test_a_sum_of_what_every_process_tells_is_seen():
    assert added_up("sum(rate(d3serve_tokens_total[1m])) / 2") == {"d3serve_tokens_total"}
    assert added_up("sum(max by (kind) (d3serve_tokens_total))") == set()


def test_what_the_service_is_watched_by_is_on_the_dashboard():
    asked = {found.name for query in QUERIES.values() for found in nodes(query, promql_parser.VectorSelector)}
    times = {
        f"d3serve_{name}_seconds_bucket" for name in ("queue_wait", "tokenize", "pass", "job", "webhook_age")
    }
    assert asked >= times | {
        "d3serve_tokens_total", "d3serve_worker_busy_seconds_total", "d3serve_worker_cached_bytes",
        "d3serve_states_total", "d3serve_attempts_total", "d3serve_reaped_leases_total", "d3serve_webhook_late_s",
    }  # fmt: skip


def test_prometheus_finds_the_api_by_address_and_reads_its_rules():
    [job] = PROMETHEUS["scrape_configs"]
    [found] = job["dns_sd_configs"]
    assert (found["names"], found["port"]) == (["api"], 8000), "a name in Host would be refused"
    assert job["job_name"] == "d3serve"
    [pattern] = PROMETHEUS["rule_files"]
    assert [path.name for path in (FOLDER / "prometheus").glob(pattern)] == ["d3serve.yml"]


def test_an_alert_says_what_it_means_and_what_to_look_at():
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert rule["annotations"].keys() == {"summary", "description"}, name


def test_grafana_finds_its_source_and_its_dashboard():
    provisioning = FOLDER / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
    [provider] = yaml.safe_load((provisioning / "dashboards" / "d3serve.yml").read_text())["providers"]
    mounts = dict(place.removesuffix(":ro").split(":") for place in SERVICES["grafana"]["volumes"])
    assert mounts["./deploy/monitoring/grafana/dashboards"] == provider["options"]["path"]
    for kind in ("datasources", "dashboards"):
        place = f"./deploy/monitoring/grafana/provisioning/{kind}"
        assert mounts[place] == f"/etc/grafana/provisioning/{kind}"
    asked = {each["datasource"]["uid"] for panel in PANELS.values() for each in (panel, *panel["targets"])}
    assert asked == {source["uid"]}


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = list(PANELS.values())
    assert len({panel["id"] for panel in panels}) == len(DASHBOARD["panels"]) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells


def test_what_watches_is_on_this_host_alone_and_has_no_password_to_leak():
    for name, port in (("prometheus", 9090), ("grafana", 3000)):
        assert SERVICES[name]["ports"] == [f"127.0.0.1:{port}:{port}"]
        assert all(place.endswith(":ro") for place in SERVICES[name]["volumes"] if place.startswith("./"))
    told = SERVICES["grafana"]["environment"]
    assert told["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert told["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true", "else admin's password is admin"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus' own checker is not installed")
def test_prometheus_own_checker_accepts_it():
    command = ["promtool", "check", "config", str(FOLDER / "prometheus" / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
