import re
from pathlib import Path

from config_builders import from_yaml

from shoal.config import PRESETS, config_section
from shoal.config.foreign_flags import ALIASES, VALUES
from shoal.config.policies import Policy
from shoal.serve import ServerOptions

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def rows():
    """Every table row of the page, as cells without backquotes around the whole cell."""
    cells = [
        re.split(r"\s*(?<!\\)\|\s*", line.strip())[1:-1]
        for line in PAGE.read_text().splitlines()
        if "|" in line
    ]
    return [[re.sub(r"^`([^`]*)`$", r"\1", cell) for cell in row] for row in cells]


def shown(key):
    return "required" if key.required else key.kind.show(key.default)


def test_the_page_lists_exactly_the_existing_keys():
    documented = {
        row[0]: row[1:3] for row in rows() if len(row) == 4 and row[0] != "key" and "--" not in row[0]
    }
    expected = {path: [key.kind.label, shown(key)] for path, key in config_section(ServerOptions).walk()}
    assert documented == expected
    assert all(row[3] for row in rows() if len(row) == 4)


def test_the_page_lists_exactly_the_existing_policies():
    documented = {
        (row[0], row[1]): row[2:4] for row in rows() if len(row) == 5 and row[0] not in ("policy", "---")
    }
    policies = [key.kind for _, key in config_section(ServerOptions).walk() if isinstance(key.kind, Policy)]
    assert len(policies) == 3, "orders, admissions and weights"
    expected = {
        (name, key.name): [key.kind.label, shown(key)]
        for policy in policies
        for name, section in policy.sections.items()
        for key in section.keys
    }
    assert documented == expected


def test_the_page_names_every_preset():
    listed = {row[0]: row[1] for row in rows() if len(row) == 2 and row[0] in PRESETS}
    assert listed == {name: preset.summary for name, preset in PRESETS.items()}


def test_the_example_on_the_page_loads(tmp_path):
    example, engines = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(from_yaml(tmp_path, f"services: [{{name: chat, model: smollm2}}]\n{engines}").devices) == 2
    config = from_yaml(tmp_path, example)
    assert [service.name for service in config.services] == ["chat", "complete"]
    assert config.scheduler.admission.reserved == 0.05


def test_the_page_has_every_alias_of_foreign_flags():
    text = PAGE.read_text().split("## Coming from another server")[1]
    for other, ours in ALIASES.items():
        line = next(line for line in text.splitlines() if f"`{other}`" in line)
        assert (f"`{ours}`" if ours else "a MODEL argument") in line
    for ours, words in VALUES.items():
        for other, own in words.items():
            assert any(
                f"`{ours} {other}`" in line and f"`{ours} {own}`" in line for line in text.splitlines()
            )
