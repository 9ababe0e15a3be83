"""The pages say only what exists: files, names, metrics, commands, tests."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import typer.main

from shoal.cli.app import app
from shoal.cluster.placing.status import PlacingStatus
from shoal.cluster.status import EngineState, EngineStatus, ServiceStatus
from shoal.config import config_section, flag_settings, load_config
from shoal.config.batch_presets import BATCH_PRESETS
from shoal.config.policies import Policy
from shoal.config.presets import PRESETS
from shoal.core import SLO, FinishReason, RequestRecord, Service
from shoal.engine import EngineStats, ServiceStats
from shoal.engine.info import EngineInfo
from shoal.engine.process_usage import DeviceUsage, ProcessUsage
from shoal.engine.stats import PoolStats, StepTotals
from shoal.execute.attention.selector import ATTENTION_BACKENDS
from shoal.forecast import PREDICTORS, Accuracy, Spread, Traffic
from shoal.schedule import ADMISSIONS, ORDERS, VICTIMS, Observed
from shoal.schedule.policies.residency import Place
from shoal.schedule.stats import WeightsStats
from shoal.serve import ServerOptions
from shoal.serve.http.request_context import RequestContext
from shoal.serve.metrics.server_metrics import ServerMetrics

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def without_code_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked by."""
    headings = re.findall(r"^#+ (.+)$", without_code_blocks(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code_blocks(page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if fragment:
            assert fragment in anchors(target), f"{page.name} links to {link}"


def test_the_index_has_every_page() -> None:
    links = set(re.findall(r"\]\(([\w.-]+\.md)\)", text("README.md")))
    assert links == {page.name for page in PAGES[1:] if page.name != "README.md"}


@pytest.mark.parametrize("name", [*ORDERS, *ADMISSIONS, *VICTIMS, *PREDICTORS])
def test_every_policy_is_described(name: str) -> None:
    page = text("policies.md")
    assert f"### `{name}`" in page or f"\n| `{name}` |" in page


def test_every_knob_is_described() -> None:
    sections = {part.split("`")[1]: part for part in text("policies.md").split("\n### ") if part[0] == "`"}
    policies = [key.kind for _, key in config_section(ServerOptions).walk() if isinstance(key.kind, Policy)]
    assert len(policies) == 3
    for name, section in [item for policy in policies for item in policy.sections.items()]:
        for key in section.keys:
            place = text("policies.md") if key.name == "admit_every" else sections[name]
            assert f"`{key.name}`" in place, f"{name}:{key.name}"


def test_the_presets_described_are_those_there_are() -> None:
    section = text("policies.md").split("\n## Presets\n")[1]
    rows = {
        cells[0]: cells[1:]
        for line in re.findall(r"^\| (`.*) \|$", section, re.MULTILINE)
        for cells in [[cell.strip("`") for cell in line.split(" | ")]]
    }
    assert rows.keys() == PRESETS.keys() - BATCH_PRESETS.keys()
    for name, (order, admission, victim, mode, preempts, layout) in rows.items():
        written = {"order": order, "admission": admission, "victim": victim, "preemption-mode": mode}
        written["preempt-for-waiting"] = preempts
        if name != "shoal":
            written |= {"max-token-gap": "never", "max-running": "256", "co-batch": "off"}
        flags = flag_settings(written, models=["m"])
        assert load_config(ServerOptions, flags=flags).scheduler == PRESETS[name].scheduler, name
        assert layout == PRESETS[name].layout, name


def test_the_two_ways_to_write_policies_down_say_the_same(tmp_path: Path) -> None:
    page = text("policies.md")
    [example] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "shoal.yaml").write_text("services: [m]\n" + example, encoding="utf-8")
    read = load_config(ServerOptions, file=tmp_path / "shoal.yaml")
    [line] = re.findall(r"^As flags: `([^`]*)`", page, re.MULTILINE)
    words = re.findall(r"--([\w-]+)(?:\s+(?!--)(\S+))?", line)
    flags = {name: value or True for name, value in words}
    assert load_config(ServerOptions, flags=flag_settings(flags, models=["m"])) == read


@pytest.mark.parametrize("name", ATTENTION_BACKENDS[1:])
def test_every_attention_backend_is_described(name: str) -> None:
    assert f"| `{name}` |" in text("architecture.md")


def exported() -> dict[str, dict[str, set[str]]]:
    """Every sample on a page of /metrics after a request: its labels, and the values they took."""
    goals = SLO(ttft_s=1, tpot_s=1, e2e_scale=5)
    service = Service(name="chat", model="m", slo=goals, execution_s=1)
    metrics = ServerMetrics([service], {"version": "1", "kernels": "k", "device": "cpu"})
    metrics.count_http("/health", "GET", 200)
    record = RequestRecord(
        request_id="1",
        service="chat",
        arrival_ns=0,
        first_token_ns=1,
        finish_ns=2,
        prompt_tokens=1,
        output_tokens=2,
    )
    metrics.count_finished(FinishReason.STOP, record, SLO(), 0.0)
    metrics.usage.count(RequestContext("id", 0, service="chat", status=200))
    pool = dict.fromkeys(PoolStats.__dataclass_fields__, 1)
    traffic = dict.fromkeys(Traffic.__dataclass_fields__, 1) | dict.fromkeys(
        ("prompt_tokens", "output_tokens", "execution_s"), Spread(1, 1)
    )
    seen = Observed(traffic=Traffic(**traffic), accuracy=Accuracy(1, 1, 1), corrections=1)  # type: ignore[arg-type]
    numbers = dict.fromkeys(WeightsStats.__dataclass_fields__, 1)
    weights = WeightsStats(**numbers | {"place": Place.RESIDENT})  # type: ignore[arg-type]
    services = {"chat": ServiceStats(observed=seen, weights=weights)}
    device = DeviceUsage(utilisation=1, memory_bytes=1, power_w=1)
    usage = ProcessUsage(cpu_s=1, rss_bytes=1, device=device)
    stats = EngineStats(services=services, pool=PoolStats(**pool), steps=StepTotals(), usage=usage)
    found: dict[str, dict[str, set[str]]] = {}
    facts = dict.fromkeys(("threads", "block_size", "merged_blocks", "kv_bytes", "weight_bytes"), 1)
    engine = EngineStatus(
        name="0",
        state=EngineState.READY,
        services=("chat",),
        device="cpu",
        heartbeat_age_s=1,
        info=EngineInfo(services={}, device="cpu", **facts),
        stats=stats,
        weights_memory_bytes=1,
    )
    services = {"chat": ServiceStatus(ready=1, wanted=1, waiting=0, batches=1)}
    page = metrics.render([engine], services, 1, PlacingStatus("search", 60.0, search_s=1.0))
    for line in page.decode().splitlines():
        match = re.match(r"(shoal_\w+?)(?:_bucket|_sum|_count|_created)?(?:\{(.*)\})? ", line)
        if match:
            labels = found.setdefault(match[1], {})
            for label, value in re.findall(r'(\w+)="([^"]*)"', match[2] or ""):
                labels.setdefault(label, set()).add(value)
    # ``_created`` of a counter is named after it without ``_total``.
    return {name: labels for name, labels in found.items() if f"{name}_total" not in found}


def test_the_metrics_described_are_those_exported() -> None:
    rows = re.findall(
        r"^\| (`shoal_\w+`(?:, `shoal_\w+`)*) \| ([\w, ]*) ?\| (.*) \|$", text("operations.md"), re.M
    )
    described = {name: row for row in rows for name in re.findall(r"shoal_\w+", row[0])}
    metrics = exported()
    assert described.keys() == metrics.keys()
    for name, labels in metrics.items():
        _, named, meaning = described[name]
        assert {label for label in labels if label != "le"} == set(re.findall(r"\w+", named)), name
        for value in set().union(
            *(labels.get(label, ()) for label in ("use", "part", "kind", "stat", "state", "place"))
        ):
            assert f"`{value}`" in meaning, f"{name} has {value}"


@each_page
def test_metrics_that_are_named_exist(page: Path) -> None:
    named = set(
        re.findall(
            r"\bshoal_(?:engine|wanted|request|inter|http|build|kv|step|preempt|recomp|prompt|cached|output|arrival|exec|mean|slo|length)"
            r"\w*",
            page.read_text(),
        )
    )
    # A histogram is asked about by these parts of it.
    assert {re.sub(r"_(sum|count|bucket)$", "", name) for name in named} <= exported().keys()


@cache
def commands() -> dict[str, set[str]]:
    """Command names, with their subcommands."""
    group = typer.main.get_command(app)
    return {name: set(getattr(command, "commands", {})) for name, command in group.commands.items()}  # type: ignore[attr-defined]


@each_page
def test_commands_that_are_named_exist(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    lines = re.findall(r"`shoal ([^`]+)`", written) + re.findall(r"^shoal (.+)$", written, re.MULTILINE)
    for line in lines:
        first, *rest = line.split()
        if first.startswith("-"):
            continue
        assert first in commands(), f"shoal {line}"
        if commands()[first] and rest:
            assert set(rest[0].split("|")) <= commands()[first], f"shoal {line}"


@cache
def functions_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@each_page
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    for name, test in re.findall(r"\b((?:src|tests|benchmarks)/[\w/.-]*\w)(?:::(\w+))?", written):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
        if test:
            assert test in functions_in(ROOT / name), f"{page.name} names {name}::{test}"
