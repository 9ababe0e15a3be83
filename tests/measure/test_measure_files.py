"""The files of a run hold every request exactly, in the same bytes each time."""

import csv
import importlib.util
import json

import pytest
from measure_builders import NS, make_row, make_run, random_run, refused_row

from shoal.core import SLO, ConfigError
from shoal.measure import FORMATS, REQUEST_COLUMNS, SAMPLE_COLUMNS, summarise, write_run


def read(folder):
    with (folder / "requests.csv").open(encoding="utf-8", newline="") as file:
        from_csv = list(csv.DictReader(file))
    from_json = [json.loads(line) for line in (folder / "requests.jsonl").read_text("utf-8").splitlines()]
    return from_csv, from_json


def test_both_request_files_say_the_same(tmp_path):
    run = random_run()
    write_run(run, tmp_path, formats=["jsonl", "csv"])
    from_csv, from_json = read(tmp_path)
    assert len(from_csv) == len(from_json) == len(run.requests)
    for text, row in zip(from_csv, from_json, strict=True):
        assert tuple(text) == tuple(row) == REQUEST_COLUMNS
        for name, value in row.items():
            if value is None:
                assert text[name] == ""
            elif isinstance(value, bool):
                assert text[name] == str(value).lower()
            elif isinstance(value, str):
                assert text[name] == value
            else:
                assert float(text[name]) == value


def test_times_are_exact_to_the_nanosecond(tmp_path):
    start = 86_400 * NS + 1  # a day later
    row = make_row("exact", output=3, largest_gap_ns=7)
    row = type(row)(**{name: getattr(row, name) for name in row.__dataclass_fields__}
                    | {"arrival_ns": start, "first_token_ns": start + 1, "finish_ns": start + 5})  # fmt: skip
    write_run(make_run([row], execution_s={"chat": 5.0}), tmp_path, formats=["jsonl", "csv"])
    (text,), (plain,) = read(tmp_path)
    assert text["arrival_s"] == "86400.000000001"
    assert text["finish_s"] == "86400.000000006"
    assert text["ttft_s"] == "0.000000001"
    assert text["largest_gap_s"] == "0.000000007"
    assert round(plain["finish_s"] * 1e9) == row.finish_ns
    assert plain["e2e_s"] == 5e-9
    assert plain["tpot_s"] == 2e-9
    assert plain["normalised_latency"] == 1e-9


def test_unknown_values_are_empty(tmp_path):
    rows = [
        refused_row('why, "so"\nhere', slo=SLO(ttft_s=1.0)),
        make_row("one", output=1),
        make_row("gone", finish="cancelled", slo=SLO(ttft_s=1.0)),
    ]
    write_run(make_run(rows, execution_s={"chat": 1.0}), tmp_path, formats=["jsonl", "csv"])
    from_csv, (refused, short, cancelled) = read(tmp_path)
    assert from_csv[0]["request_id"] == 'why, "so"\nhere'
    assert refused["first_token_s"] is refused["ttft_s"] is refused["normalised_latency"] is None
    assert (refused["engine"], refused["finish"], refused["slo_met"]) == (-1, "refused", False)
    assert refused["error"] == from_csv[0]["error"] == "needs 9,000 blocks, the pool has 100"
    assert short["tpot_s"] is short["largest_gap_s"] is short["slo_met"] is None
    assert short["ttft_s"] == 1.0
    assert cancelled["slo_met"] is cancelled["normalised_latency"] is None


def test_samples_and_summary(tmp_path):
    run = random_run()
    paths = write_run(run, tmp_path / "new" / "folder", formats=["samples", "summary"])
    assert [path.name for path in paths] == ["summary.json", "samples.csv"]
    with (tmp_path / "new/folder/samples.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == SAMPLE_COLUMNS
    for text, sample in zip(rows, run.samples, strict=True):
        assert round(float(text["time_s"]) * NS) == sample.time_ns
        assert (int(text["engine"]), int(text["waiting"])) == (sample.engine, sample.waiting)
        assert float(text["kv_used"]) == pytest.approx(sample.kv_used)
    plain = json.loads(paths[0].read_text("utf-8"))
    assert plain["facts"] == run.facts
    assert plain["overall"] == json.loads(json.dumps(summarise(run).to_dict()))["overall"]


@pytest.mark.slow
def test_equal_runs_give_equal_files(tmp_path):
    first = write_run(random_run(), tmp_path / "first")
    second = write_run(random_run(), tmp_path / "second")
    assert [path.name for path in first] == [name for name, _ in FORMATS.values()]
    for first_file, second_file in zip(first, second, strict=True):
        assert first_file.read_bytes() == second_file.read_bytes() != b""


@pytest.mark.parametrize("run", [make_run(engines=()), make_run([refused_row()])])
def test_every_file_of_an_empty_run_can_be_read(run, tmp_path):
    write_run(run, tmp_path)
    from_csv, from_json = read(tmp_path)
    assert len(from_csv) == len(from_json) == len(run.requests)
    for name in ("summary.json", "trace.json"):
        text = (tmp_path / name).read_text("utf-8")
        assert "NaN" not in text
        json.loads(text)
    assert (tmp_path / "report.html").read_text("utf-8").rstrip().endswith("</html>")


def test_unknown_formats_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="unknown output format excel, pdf; there are: summary, jsonl, csv"):
        write_run(make_run(), tmp_path / "none", formats=["pdf", "csv", "excel"])
    assert not (tmp_path / "none").exists()


def test_missing_matplotlib_is_reported_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[plots\]'"):
        write_run(make_run(), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert len(write_run(make_run(), tmp_path / "some", formats=set(FORMATS) - {"html"})) == len(FORMATS) - 1


def test_an_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the results of a run to"):
        write_run(make_run(), tmp_path / "file")
