"""Files of ``deploy/``: the metrics that they name exist, and the tools that they are for accept them."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serve_builders import FakeEngine, completion, make_app, make_client
from weights_status import engine_with_weights

from shoal.schedule.policies.residency import Place
from shoal.serve import ServerOptions

DEPLOY = Path(__file__).parents[2] / "deploy"
MANUAL = DEPLOY.parent / "docs" / "deploy.md"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
UNIT = DEPLOY / "systemd" / "shoal.service"
PROMTOOL = shutil.which("promtool")
SYSTEMD_ANALYZE = shutil.which("systemd-analyze")
METRIC = re.compile(r"\bshoal_\w+")


@pytest.fixture(scope="module")
def page():
    """Labels by name of everything that /metrics prints."""

    async def main():
        limited = engine_with_weights("b", {"chat": Place.RESIDENT})
        async with make_client(make_app(FakeEngine(others=(limited,)))) as client:
            await client.post("/v1/completions", json=completion())
            return (await client.get("/metrics")).text

    labels = {}
    for family in text_string_to_metric_families(asyncio.run(main())):
        for name in (family.name, f"{family.name}_total"):
            labels.setdefault(name, set())
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def dashboard():
    return json.loads((DEPLOY / "grafana" / "shoal.json").read_text())


def expressions():
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    return panels + [rule["expr"] for rule in alert_rules()]


def alert_rules():
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_every_metric_that_is_named_is_printed(page):
    variables = [variable["query"]["query"] for variable in dashboard()["templating"]["list"][1:]]
    named = {name for text in [*expressions(), *variables] for name in METRIC.findall(text)}
    assert len(named) > 20
    assert named <= set(page)


def test_every_label_that_is_named_is_there(page):
    found = set()
    for text in expressions():
        for name, matchers in re.findall(r"\b(shoal_\w+)\{([^}]*)\}", text):
            labels = set(re.findall(r"(\w+)=", matchers)) - {"instance"}
            assert labels <= page[name], (name, labels)
            found |= labels
    assert {"service", "status", "use"} <= found


def test_every_metric_of_the_manual_is_there(page):
    text = MANUAL.read_text()
    named = re.findall(r"\b(shoal_\w+)(?:\{([^}]*)\})?", text)
    assert {name for name, _ in named} <= set(page)
    labelled = [(name, set(re.findall(r"(\w+)=", matchers))) for name, matchers in named if matchers]
    assert labelled
    assert all(labels <= page[name] for name, labels in labelled)


def test_vllm_names_of_the_manual_are_there():
    async def main():
        async with make_client(make_app(vllm_metrics=True)) as client:
            return (await client.get("/metrics")).text

    page = asyncio.run(main())
    families = {family.name: family.type for family in text_string_to_metric_families(page)}
    lacks = {"vllm:cache_config_info", "vllm:lora_requests_info"}
    has = set(re.findall(r"`(vllm:\w+)`", MANUAL.read_text())) - lacks
    assert len(has) == 3
    assert {families[name] for name in has} == {"gauge"}
    assert not lacks & set(families)


def test_panels_do_not_overlap():
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def promtool(*arguments):
    if PROMTOOL is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_alert_rules():
    promtool("check", "rules", str(ALERTS))


def test_the_alert_rules_fire_when_they_should():
    promtool("test", "rules", str(ALERTS.with_name("alerts_test.yml")))


def test_every_alert_is_tested():
    tests = yaml.safe_load(ALERTS.with_name("alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in alert_rules()}


def test_prometheus_accepts_the_queries_of_the_dashboard(tmp_path):
    text = [re.sub(r"\$__rate_interval", "5m", query) for query in expressions()]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(text)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_prometheus_accepts_the_page(page):
    if PROMTOOL is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")

    async def main():
        async with make_client(make_app(vllm_metrics=True)) as client:
            return (await client.get("/metrics")).content

    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=asyncio.run(main()), capture_output=True, timeout=60
    )
    errors = [line for line in done.stderr.decode().splitlines() if "error" in line.lower()]
    assert done.returncode in (0, 3), done.stderr  # 3: it has advice about names
    assert not errors


def test_systemd_accepts_the_unit(tmp_path):
    if SYSTEMD_ANALYZE is None:
        pytest.skip("systemd-analyze, which comes with systemd, is not installed")
    unit = tmp_path / UNIT.name
    # It must name a program that is there.
    unit.write_text(UNIT.read_text().replace("/opt/shoal/.venv/bin/shoal", sys.executable))
    command = [SYSTEMD_ANALYZE, "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    warnings = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, warnings) == (0, [])


def test_the_unit_stops_later_than_requests_under_way():
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert int(seconds) > ServerOptions().drain_s
