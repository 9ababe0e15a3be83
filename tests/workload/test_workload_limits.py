"""No number in a trace or an option, however large or odd, ends in anything but a clear error."""

import json
from pathlib import Path

import pytest
import workload_builders as build

from shoal.core import ConfigError
from shoal.workload import (
    FORMATS,
    FixedLength,
    Independent,
    Poisson,
    Replay,
    WorkloadOptions,
    build_requests,
    build_workload,
    load_trace,
    read_trace,
    to_requests,
)

SMALL = Independent(FixedLength(8), FixedLength(2))
HUGE = "99999999999999999999"
COUNTS_HEAD = "HashOwner,HashApp,HashFunction,Trigger,1,2\n"


def servegen(folder: Path, trace: str, lengths: str = "{5: 1}") -> Path:
    (folder / "chunk-3-trace.csv").write_text(trace)
    data = {"0": {"input_tokens": lengths, "output_tokens": "{1: 1}"}}
    (folder / "chunk-3-dataset.json").write_text(json.dumps(data))
    return folder


def error(path: Path, **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_trace(path, **more)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("trace", "lengths", "problem"),
    [
        (
            "0,1,1,Gamma,1,1\n",
            f"{{{HUGE}: 1}}",
            "chunk-3-dataset.json:1: window 0 has requests but no distri",
        ),
        ("0,1,1,Gamma,1,1\n", "{1000000001: 1}", "lengths from 1 to 1000000000"),
        ("0,1,1,Gamma,1,1\n", "{" + "9" * 400 + ": 1}", "lengths from 1 to 1000000000"),
        ("0,1,1,Gamma,1,1\n", "{5: 1" + "0" * 400 + "}", "chunk-3-dataset.json:1: "),
        (
            "600,1,1,Gamma,1,1\n0,1e10,1,Gamma,1,1\n",
            "{5: 1}",
            "chunk-3-trace.csv:2: rate is '1e10'; expected a",
        ),
        ("1e11,1,1,Gamma,1,1\n", "{5: 1}", "chunk-3-trace.csv:1: t is '1e11'"),
    ],
)
def test_servegen_has_limits(trace: str, lengths: str, problem: str, tmp_path: Path) -> None:
    assert problem in error(servegen(tmp_path, trace, lengths))


def test_servegen_takes_what_is_just_within_the_limits(tmp_path: Path) -> None:
    rows = read_trace(servegen(tmp_path, "3155000400,0.005,1,Gamma,1,1\n", "{1000000000: 1}"))
    assert [row.prompt_tokens for row in rows] == [10**9] * 3


def test_counts_have_a_limit_for_every_minute_and_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.write(tmp_path, f"{COUNTS_HEAD}o,A,f,http,0,1000000000\n")
    assert ":2: minute 2 is '1000000000'; expected a whole number from 0 to 1000000" in error(path)
    monkeypatch.setattr("shoal.workload.functions.LARGEST_REQUESTS", 5)
    path = build.write(tmp_path, f"{COUNTS_HEAD}o,A,f,http,2,3\no,B,f,http,0,1\n")
    assert ":3: more than 5 invocations so far; expected at most 5; keep fewer lines" in error(path)


def test_a_trace_of_more_requests_than_memory_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.workload.readers.LARGEST_REQUESTS", 2)
    path = build.write(tmp_path, "prompt_tokens,output_tokens\n" + "1,1\n" * 3)
    assert "more than 2 requests; ask for the first so many of them" in error(path)
    assert len(load_trace(path, limit=2).rows) == 2


def test_too_many_requests_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"workload\.requests must be at most 20,000,000"):
        WorkloadOptions(lengths=SMALL, arrivals=Poisson(1.0), requests=10**12)


@pytest.mark.parametrize("scale", [1e300, 1e7, float("inf"), float("nan"), 0.0])
def test_times_are_not_stretched_beyond_measure(scale: float) -> None:
    for refuse in (
        lambda: WorkloadOptions(lengths=SMALL, requests=1, time_scale=scale),
        lambda: Replay(time_scale=scale),
        lambda: to_requests([build.row()], "a", time_scale=scale),
    ):
        with pytest.raises(ConfigError, match=r"time_scale must be more than 0 and at most 1e\+06"):
            refuse()


def test_no_request_arrives_later_than_a_hundred_years(tmp_path: Path) -> None:
    path = build.write(tmp_path, "prompt_tokens,output_tokens,arrival_s\n1,1,0\n1,1,3.2e3\n")
    assert len(build_requests(WorkloadOptions(trace=path, time_scale=9e5), ["a"])) == 2
    for options in (
        WorkloadOptions(trace=path, time_scale=1e6),
        WorkloadOptions(trace=path, arrivals=Replay(time_scale=1e6)),
    ):
        with pytest.raises(ConfigError, match=r"last of 2 requests would arrive after 101 years.*time_scale"):
            build_requests(options, ["a"])
    with pytest.raises(ConfigError, match=r"would arrive after .* years, and a hundred"):
        Poisson(1e-3).times_ns(4_000_000, 0)


def test_times_in_traces_are_limited_with_their_line(tmp_path: Path) -> None:
    head = "prompt_tokens,output_tokens,arrival_s\n"
    assert ":3: arrival_s is '1e10'" in error(build.write(tmp_path, f"{head}1,1,0\n1,1,1e10\n"))
    milliseconds = '{"timestamp": %d, "input_length": 5, "output_length": 5}\n'
    now = build.write(tmp_path, milliseconds % 1_787_267_980_000)
    assert load_trace(now, from_zero=False).rows[0].arrival_ns == 1_787_267_980 * 10**9
    assert ":1: timestamp is" in error(build.write(tmp_path, milliseconds % 10**13))


@pytest.mark.parametrize("number", ["3_74", "٣٧٤", "３７４", "3_7.0", "1_0e1"])
def test_numbers_that_only_python_reads_are_refused(number: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(f"prompt_tokens,output_tokens\n5,5\n5,{number}\n", encoding="utf-8")
    assert f":3: output_tokens is '{number}'" in error(path)
    path.write_text(f"prompt_tokens,output_tokens,arrival_s\n5,5,{number}\n", encoding="utf-8")
    assert f":2: arrival_s is '{number}'" in error(path)


def test_azure_times_have_plain_digits(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(f"{head}2023-11-16 18:15:46.٣,374,44\n", encoding="utf-8")
    assert ":2: TIMESTAMP is" in error(path)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = build.write(tmp_path, "prompt_tokens,output_tokens,Prompt_Tokens\n1,2,3\n")
    assert ":1: column prompt_tokens more than once; expected one of each" in error(path)
    path = build.write(tmp_path, "prompt_tokens,output_tokens,x,x\n1,2,3,4\n")
    assert build.lengths(read_trace(path)) == [(1, 2)]


@pytest.mark.parametrize(
    ("text", "line"), [("[] x", 1), ("[]\n\n[]", 3), ('[{"conversations": []}\n]\n}', 3)]
)
def test_nothing_follows_the_list_of_sharegpt(text: str, line: int, tmp_path: Path) -> None:
    assert f":{line}: the list has ended, but" in error(build.write(tmp_path, text))
    assert read_trace(build.write(tmp_path, "[] \n")) == []


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"\x1f\x8b\x08", "is compressed with gzip; unpack it first"),
        (b"PK\x03\x04", "is a zip archive; unpack it first"),
        ("prompt_tokens,output_tokens\n1,2\n".encode("utf-16"), "is UTF-16, not UTF-8; convert it first"),
        ("prompt_tokens,output_tokens\n1,2\n".encode("utf-16-be"), "it is not UTF-8 text"),
        (b"\x80\x81,\x82\n", "it is not UTF-8 text"),
    ],
)
def test_files_of_another_kind_say_so_without_noise(head: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(head)
    message = error(path)
    assert message.startswith(f"{path}: ")
    assert what in message
    assert message.isprintable()
    if "first" in what:
        assert what in error(path, format="lengths")


@pytest.mark.parametrize("name", ["turns", "sharegpt"])
def test_a_conversation_is_no_longer_than_its_hashes_fit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.workload.conversations.MAX_CONVERSATION_TOKENS", 500)
    turns = "conv,turn,role,tokens\n0,0,human,300\n0,1,gpt,200\n0,2,human,1\n"
    talk = [{"from": "human", "value": "a" * 1200}, {"from": "gpt", "value": "b" * 804}]
    text = turns if name == "turns" else json.dumps([{"conversations": talk}])
    message = error(build.write(tmp_path, text))
    assert f":{4 if name == 'turns' else 1}: " in message
    assert "500" in message


def test_a_turn_of_a_billion_tokens_is_refused(tmp_path: Path) -> None:
    path = build.write(tmp_path, "conv,turn,role,tokens\n0,0,human,1000000000\n0,1,gpt,1\n")
    assert ":2: conversation 0 has 1000000000 tokens with this turn; expected at most 10000000" in error(path)


def test_skipped_requests_are_noted(tmp_path: Path) -> None:
    path = build.write(tmp_path, "prompt_tokens,output_tokens\n" + "5,0\n" * 12 + "5,6\n")
    built = build_workload(WorkloadOptions(trace=path, arrivals=Poisson(1.0)), ["a"])
    assert len(built.requests) == 1
    assert built.note.startswith("12 requests skipped")
    whole = build.write(tmp_path, "prompt_tokens,output_tokens\n5,6\n")
    assert build_workload(WorkloadOptions(trace=whole, arrivals=Poisson(1.0)), ["a"]).note == ""


def test_every_format_names_the_line_of_a_length_that_is_too_long(tmp_path: Path) -> None:
    texts = {
        "azure": build.AZURE.replace("396", HUGE),
        "mooncake": build.MOONCAKE.replace('h": 513', f'h": {HUGE}'),
        "bailian": build.BAILIAN.replace('h": 48', f'h": {HUGE}'),
        "burstgpt": build.BURSTGPT.replace("1087", HUGE),
        "turns": build.TURNS.replace("244", HUGE),
        "timed-lengths": build.TIMED_LENGTHS.replace("36,", f"{HUGE},"),
        "lengths": build.LENGTHS_TABLE.replace("30", HUGE),
        "requests": build.REQUESTS.replace("1034", HUGE),
    }
    assert set(texts) == {name for name, kind in FORMATS.items() if kind.sized} - {"servegen", "sharegpt"}
    for name, text in texts.items():
        assert HUGE in text
        message = error(build.write(tmp_path, text), format=name)
        assert HUGE in message
        assert ":" in message.removeprefix(str(tmp_path))
