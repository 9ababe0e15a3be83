"""Every format: its contents, its detection, and errors of broken lines."""

import gzip
import json
from pathlib import Path

import pytest
import workload_builders as build

from shoal.core import ConfigError
from shoal.workload import FORMATS, block_hashes, guess_format, load_trace, read_trace

SAMPLES = {
    "azure": build.AZURE,
    "mooncake": build.MOONCAKE,
    "bailian": build.BAILIAN,
    "burstgpt": build.BURSTGPT,
    "maf-counts": build.COUNTS,
    "maf-invocations": build.INVOCATIONS,
    "sharegpt": build.SHAREGPT,
    "turns": build.TURNS,
    "timed-lengths": build.TIMED_LENGTHS,
    "lengths": build.LENGTHS_TABLE,
    "requests": build.REQUESTS,
}


def test_every_format_but_the_folder_has_a_sample() -> None:
    assert set(SAMPLES) == set(FORMATS) - {"servegen"}


@pytest.mark.parametrize("name", SAMPLES)
def test_format_is_guessed_from_the_content(name: str, tmp_path: Path) -> None:
    path = build.write(tmp_path, SAMPLES[name])
    assert guess_format(path) == name
    assert read_trace(path) == read_trace(path, name) != []


@pytest.mark.parametrize("name", SAMPLES)
def test_byte_order_mark_blank_lines_and_windows_line_ends_change_nothing(name: str, tmp_path: Path) -> None:
    plain = build.write(tmp_path, SAMPLES[name], "plain")
    odd = build.write(tmp_path, "\ufeff" + SAMPLES[name].replace("\n", "\r\n") + "\r\n\r\n", "odd")
    if name == "maf-counts":  # its draws are keyed by the line
        assert len(read_trace(odd)) == len(read_trace(plain))
    else:
        assert read_trace(odd) == read_trace(plain)


def test_azure_keeps_seven_digits_of_the_second(tmp_path: Path) -> None:
    rows = read_trace(build.write(tmp_path, build.AZURE))
    assert [row.arrival_ns for row in rows] == [0, 4_314_579_000]
    assert build.lengths(rows) == [(374, 44), (396, 109)]


def test_azure_takes_whole_seconds_and_utc_offsets(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01,5,6\n2024-05-10 00:00:01.25+00:00,5,6\n"
    )
    assert [row.arrival_ns for row in read_trace(build.write(tmp_path, text))] == [0, 250_000_000]


def test_azure_times_are_since_1970_unless_shifted(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n1970-01-02 00:00:00.0000001,5,6\n"
    trace = load_trace(build.write(tmp_path, text), from_zero=False)
    assert trace.rows[0].arrival_ns == 86_400 * 10**9 + 100


def test_mooncake_has_milliseconds_and_hashes(tmp_path: Path) -> None:
    first, second = read_trace(build.write(tmp_path, build.MOONCAKE))
    assert (first.arrival_ns, first.hashes, first.hash_tokens) == (0, (0, 1), 512)
    assert (second.arrival_ns, second.prompt_tokens, second.output_tokens) == (3 * 10**9, 513, 6)


def test_mooncake_without_hashes_shares_nothing(tmp_path: Path) -> None:
    text = '{"timestamp": 1, "input_length": 600, "output_length": 5}\n'
    assert read_trace(build.write(tmp_path, text))[0].hashes == ()


def test_bailian_has_seconds_and_hashes_of_16_tokens_and_conversations(tmp_path: Path) -> None:
    rows = read_trace(build.write(tmp_path, build.BAILIAN))
    assert [row.arrival_ns for row in rows] == [0, 886_000_000, 4_386_000_000]
    assert build.lengths(rows) == [(40, 132), (3, 9), (48, 8)]
    assert [(row.hash_tokens, len(row.hashes)) for row in rows] == [(16, 3), (16, 1), (16, 3)]
    assert [(row.request_id, row.client) for row in rows] == [("159", "159"), ("160", "160"), ("7", "159")]
    first, _, last = (block_hashes(row, 16) for row in rows)
    assert first == last[:2]


SHORT = '"timestamp": 2.5, "input_length": 5, "output_length": 6'


@pytest.mark.parametrize(
    ("line", "name", "arrival_s"),
    [
        (
            '{"chat_id": 1, "parent_chat_id": -1, %s, "type": "text", "turn": 1, "hash_ids": [1]}',
            "bailian",
            2.5,
        ),
        ('{"chat_id": 1, %s, "hash_ids": [1]}', "bailian", 2.5),
        ('{%s, "chat_id": "a"}', "bailian", 2.5),
        ('{%s, "hash_ids": [1]}', "mooncake", 0.0025),
        ("{%s}", "mooncake", 0.0025),
        ('{"session_id": "a", %s}', "mooncake", 0.0025),
    ],
)
def test_members_distinguish_bailian_from_mooncake(
    line: str, name: str, arrival_s: float, tmp_path: Path
) -> None:
    trace = load_trace(build.write(tmp_path, line % SHORT), from_zero=False)
    assert (trace.format, trace.rows[0].arrival_ns / 1e9) == (name, arrival_s)


def test_neither_is_read_as_the_other_on_demand(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=":1: 'chat_id', so it is Bailian's, with times in seconds"):
        load_trace(build.write(tmp_path, build.BAILIAN), "mooncake")
    with pytest.raises(ConfigError, match=":1: no 'chat_id'"):
        load_trace(build.write(tmp_path, build.MOONCAKE), "bailian")


BLOCKS = '"timestamp": 61.1, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]'
NO_ANSWER = '"timestamp": 61.1, "input_length": 40, "output_length": 0'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f'{{"parent_chat_id": 3, {BLOCKS}}}', 'an object like {"chat_id": 159,'),
        (f"{{{BLOCKS}}}", "need 'chat_id'"),
        (f"{{{NO_ANSWER}}}", "need 'chat_id'"),
    ],
)
def test_bailian_lines_without_chats_are_rejected(line: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace(build.write(tmp_path, line))
    assert expected in str(error.value).partition("; expected ")[2]


def test_bailian_without_a_parent_or_an_answer(tmp_path: Path) -> None:
    lines = [
        '{"chat_id": 2, "parent_chat_id": 1, "timestamp": 1, "input_length": 5, "output_length": 6}',
        '{"chat_id": 3, "parent_chat_id": 2, "timestamp": 2, "input_length": 5, "output_length": 0}',
        '{"chat_id": 4, "parent_chat_id": 3, "timestamp": 3, "input_length": 5, "output_length": 6}',
    ]
    trace = load_trace(build.write(tmp_path, "\n".join(lines)))
    assert [(row.request_id, row.client) for row in trace.rows] == [("2", "1"), ("4", "1")]
    assert trace.skipped == 1
    with pytest.raises(
        ConfigError, match=r":1: 2 hash_ids; expected .* at most 1 for 16 tokens in blocks of 16"
    ):
        read_trace(
            build.write(
                tmp_path,
                '{"chat_id": 1, "timestamp": 0, "input_length": 16, "output_length": 1,"hash_ids": [1, 2]}',
            )
        )


def test_sessions_of_mooncake_lines_are_clients(tmp_path: Path) -> None:
    text = '{"timestamp": 1, "input_length": 6, "output_length": 5, "session_id": "s"}\n'
    assert read_trace(build.write(tmp_path, text))[0].client == "s"


def test_burstgpt_skips_failures_and_counts_them(tmp_path: Path) -> None:
    trace = load_trace(build.write(tmp_path, build.BURSTGPT))
    assert build.lengths(trace.rows) == [(472, 18), (417, 276)]
    assert [row.arrival_ns for row in trace.rows] == [0, 113_500_000_000]
    assert [row.client for row in trace.rows] == ["ChatGPT Conversation log", "GPT-4 API log"]
    assert trace.skipped == 1
    assert trace.note == "1 request skipped, which failed or had nothing to ask or answer"


def test_burstgpt_with_sessions(tmp_path: Path) -> None:
    assert build.lengths(read_trace(build.write(tmp_path, build.BURSTGPT_SESSIONS))) == [(472, 18)]


def test_length_tables_have_no_times_and_skip_empty_lines(tmp_path: Path) -> None:
    trace = load_trace(build.write(tmp_path, build.LENGTHS_TABLE))
    assert (trace.timed, trace.sized, trace.skipped) == (False, True, 1)
    assert build.lengths(trace.rows) == [(10, 20), (30, 40)]


@pytest.mark.parametrize("pair", ["prompt_tokens,output_tokens", "num_prefill_tokens,num_decode_tokens"])
def test_length_tables_by_other_names_and_with_more_columns(pair: str, tmp_path: Path) -> None:
    path = build.write(tmp_path, f"id,{pair},more\n7,3,4,x\n8,5.0,6,y\n")
    assert build.lengths(read_trace(path)) == [(3, 4), (5, 6)]


def test_length_table_with_times_and_clients(tmp_path: Path) -> None:
    trace = load_trace(build.write(tmp_path, build.TIMED_LENGTHS))
    assert trace.timed
    assert [(row.arrival_ns, row.client) for row in trace.rows] == [(0, "a"), (207_938_000, "b")]


def test_vidur_keeps_its_arrivals(tmp_path: Path) -> None:
    trace = load_trace(build.write(tmp_path, build.VIDUR), from_zero=False)
    assert (trace.format, trace.timed, trace.skipped) == ("timed-lengths", True, 1)
    assert [row.arrival_ns for row in trace.rows] == [500_000_000, 4_814_579_000]
    assert build.lengths(trace.rows) == [(374, 44), (396, 109)]


@pytest.mark.parametrize(
    ("column", "arrival_ns"),
    [
        ("arrival_s", 2_500_000_000), ("arrived_at", 2_500_000_000), ("arrival_time", 2_500_000_000),
        ("arrival_time_s", 2_500_000_000), ("arrival_ms", 2_500_000), ("Arrival_Time_ms", 2_500_000),
    ],
)  # fmt: skip
def test_columns_of_arrivals_have_their_units(column: str, arrival_ns: int, tmp_path: Path) -> None:
    text = f"prompt_len,output_len,{column},session_id,request_id,service\n3,4,2.5,s,a,chat\n"
    trace = load_trace(build.write(tmp_path, text), from_zero=False)
    [row] = trace.rows
    assert (trace.timed, row.arrival_ns) == (True, arrival_ns)
    assert (row.client, row.request_id, row.service) == ("s", "a", "chat")


@pytest.mark.parametrize(
    "column",
    ["timestamp", "arrival", "arrives", "time", "time_ms", "start_time", "sent_ts", "created_at", "date"],
)
def test_times_in_an_unknown_unit_are_not_dropped_without_a_word(column: str, tmp_path: Path) -> None:
    path = build.write(tmp_path, f"prompt_tokens,output_tokens,{column}\n3,4,7\n")
    with pytest.raises(ConfigError, match=f"column '{column}' seems to say when .* arrival_s, arrived_at"):
        load_trace(path)
    assert load_trace(path, "lengths").timed is False


@pytest.mark.parametrize(
    "column", ["e2e_time", "time_to_first_token", "latency_s", "num_total_tokens", "pd_ratio"]
)
def test_other_columns_of_tables_may_be_there(column: str, tmp_path: Path) -> None:
    path = build.write(tmp_path, f"prompt_tokens,output_tokens,{column}\n3,4,7\n")
    assert load_trace(path).format == "lengths"


def test_request_logs(tmp_path: Path) -> None:
    rows = read_trace(build.write(tmp_path, build.REQUESTS))
    assert build.lengths(rows) == [(2358, 531), (1034, 769)]
    assert [row.arrival_ns for row in rows] == [0, 500_000_000]


def test_invocations_arrive_before_they_end_in_order_of_arrival(tmp_path: Path) -> None:
    trace = load_trace(build.write(tmp_path, build.INVOCATIONS))
    assert not trace.sized
    assert [(row.arrival_ns, row.client) for row in trace.rows] == [(0, "A/g"), (5_500_000_000, "A/f")]


def test_counts_become_arrivals_within_their_minutes(tmp_path: Path) -> None:
    path = build.write(tmp_path, build.COUNTS)
    rows = load_trace(path, seed=1, from_zero=False).rows
    minutes = sorted((row.client, row.arrival_ns // (60 * 10**9)) for row in rows)
    assert minutes == [("A/f", 0), ("A/f", 0), ("A/f", 2), ("B/g", 1), ("B/g", 1), ("B/g", 1)]
    assert rows == load_trace(path, seed=1, from_zero=False).rows
    assert rows != load_trace(path, seed=2, from_zero=False).rows


def test_minutes_are_those_of_the_header(tmp_path: Path) -> None:
    head = "HashOwner,HashApp,HashFunction,Trigger,"
    path = build.write(tmp_path, f"{head}61,90\no,A,f,http,1,1\n")
    assert [row.arrival_ns // (60 * 10**9) for row in load_trace(path, from_zero=False).rows] == [60, 89]
    with pytest.raises(ConfigError, match=":1: a column of a minute is 'first'"):
        load_trace(build.write(tmp_path, f"{head}first\no,A,f,http,1\n"))


def test_out_of_order_times_are_sorted_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    lines = [
        json.dumps({"timestamp": time, "input_length": prompt, "output_length": 1})
        for time, prompt in ((9, 1), (4, 2), (4, 3))
    ]
    rows = read_trace(build.write(tmp_path, "\n".join(lines)))
    assert [(row.arrival_ns, row.prompt_tokens) for row in rows] == [(0, 2), (0, 3), (5_000_000, 1)]


@pytest.mark.parametrize("text", ["", "\n\n"])
@pytest.mark.parametrize("name", [None, *SAMPLES])
def test_empty_file_is_an_empty_trace(name: str | None, text: str, tmp_path: Path) -> None:
    assert read_trace(build.write(tmp_path, text), name) == []


@pytest.mark.parametrize(
    "name", ["azure", "burstgpt", "maf-counts", "maf-invocations", "turns", "timed-lengths", "lengths"]
)
def test_header_alone_is_an_empty_trace(name: str, tmp_path: Path) -> None:
    assert read_trace(build.write(tmp_path, SAMPLES[name].splitlines()[0] + "\n")) == []


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = build.write(tmp_path, build.MOONCAKE + "broken\n")
    assert len(load_trace(path, limit=2).rows) == 2
    assert load_trace(path, limit=0).rows == []
    with pytest.raises(ConfigError, match=":3: not JSON"):
        load_trace(path, limit=3)


AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
TIME = "2023-11-16 18:15:47.0000000"
ZERO = '{"timestamp": 1, "input_length": 5, "output_length": 0, "hash_ids": []}'
BROKEN = [
    ("azure", f"{AZURE_HEAD}{TIME},0,44\n", 3, "ContextTokens is '0'"),
    ("azure", f"{AZURE_HEAD}{TIME},5,0\n", 3, "GeneratedTokens is '0'"),
    ("azure", f"{AZURE_HEAD}{TIME},-5,1\n", 3, "ContextTokens is '-5'"),
    ("azure", f"{AZURE_HEAD}{TIME},5\n", 3, "2 columns; expected 3"),
    ("azure", f"{AZURE_HEAD}{TIME},5,6,7\n", 3, "4 columns"),
    ("azure", f"{AZURE_HEAD}{TIME},five,6\n", 3, "ContextTokens is 'five'"),
    ("azure", f"{AZURE_HEAD}{TIME},1.5,6\n", 3, "ContextTokens is '1.5'"),
    ("azure", f"{AZURE_HEAD}{TIME},inf,6\n", 3, "ContextTokens is 'inf'"),
    ("azure", f"{AZURE_HEAD}{TIME},99999999999,6\n", 3, "ContextTokens"),
    ("azure", f"{AZURE_HEAD}yesterday,5,6\n", 3, "TIMESTAMP is 'yesterday'"),
    ("azure", f"{AZURE_HEAD}2023-11-16 18:15:47.12x,5,6\n", 3, "TIMESTAMP"),
    ("azure", f"{AZURE_HEAD}2023-13-16 18:15:47.1,5,6\n", 3, "TIMESTAMP"),
    ("azure", f"{AZURE_HEAD},5,6\n", 3, "TIMESTAMP is ''"),
    ("azure", f'{AZURE_HEAD}"{TIME},5,6\n', 3, "no CSV"),
    ("mooncake", build.MOONCAKE + "{oops\n", 3, "not JSON"),
    ("mooncake", build.MOONCAKE + "[1, 2]\n", 3, "a JSON list"),
    ("mooncake", build.MOONCAKE + '{"timestamp": 1, "input_length": 5}\n', 3, "no 'output_length'"),
    ("mooncake", build.MOONCAKE + ZERO + "\n", 3, "output_length is '0'"),
    ("mooncake", build.MOONCAKE + ZERO.replace("0,", "true,") + "\n", 3, "output_length is 'true'"),
    ("mooncake", build.MOONCAKE + ZERO.replace("0,", "null,") + "\n", 3, "output_length is 'null'"),
    ("mooncake", build.MOONCAKE + ZERO.replace("0, ", "1, ").replace("[]", "7") + "\n", 3, "hash_ids is '7'"),
    (
        "mooncake",
        build.MOONCAKE + ZERO.replace("0, ", "1, ").replace("[]", '["a"]') + "\n",
        3,
        "hash_ids has",
    ),
    ("mooncake", build.MOONCAKE + ZERO.replace("0, ", "1, ").replace("[]", "[1,2]") + "\n", 3, "2 hash_ids"),
    (
        "mooncake",
        build.MOONCAKE + ZERO.replace("0, ", "1, ").replace(": 1,", ": NaN,", 1) + "\n",
        3,
        "timestamp",
    ),
    ("burstgpt", build.BURSTGPT + "soon,GPT-4,1,2,3,API log\n", 5, "Timestamp is 'soon'"),
    ("burstgpt", build.BURSTGPT + "9,GPT-4,0,2,2,API log\n", 5, "Request tokens is '0'"),
    ("burstgpt", build.BURSTGPT + "9,GPT-4,1,-2,2,API log\n", 5, "Response tokens is '-2'"),
    ("lengths", build.LENGTHS_TABLE + "7,-1\n", 5, "output_tokens is '-1'"),
    ("timed-lengths", build.TIMED_LENGTHS + "2,c,nan,1,1\n", 4, "arrival_s is 'nan'"),
    ("turns", build.TURNS + "0,3,gpt,5\n", 9, "turn 3 of conversation 0; expected one after turn 3"),
    ("turns", build.TURNS + "0,4,gpt,x\n", 9, "tokens is 'x'"),
    ("requests", build.REQUESTS + '{"input_toks": 1, "output_toks": 2}\n', 3, "no 'arrival_time'"),
    ("maf-counts", build.COUNTS + "o,C,h,http,1,-1,0\n", 4, "minute 2 is '-1'"),
    ("maf-counts", build.COUNTS + "o,C,h,http,1\n", 4, "5 columns; expected 7"),
    ("maf-invocations", build.INVOCATIONS + "A,f,1.0,-2\n", 4, "duration is '-2'"),
    ("sharegpt", build.SHAREGPT[:-40], 30, "not JSON"),
    ("sharegpt", '[{"conversations": []},\n{"conversations": []}', 2, "the file ends inside the list"),
    ("sharegpt", '[{"conversations": []}\n{"conversations": []}]', 2, "no comma"),
    ("sharegpt", '[{"conversations": []},\n\n{"turns": []}]', 3, "no list 'conversations'"),
    ("sharegpt", '[\n{"conversations": [{"from": "human"}]}]', 2, "a turn without texts"),
]


@pytest.mark.parametrize(("name", "text", "line", "problem"), BROKEN)
def test_broken_lines_are_named(name: str, text: str, line: int, problem: str, tmp_path: Path) -> None:
    path = build.write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:")
    assert problem in message
    assert "expected" in message
    if "not JSON" not in problem or name == "mooncake":
        assert message.startswith(f"{path}:{line}: ")


def test_truncated_sharegpt_names_the_line_of_the_broken_conversation(tmp_path: Path) -> None:
    text = '[\n{"conversations": []},\n{"conversations": [\n{"from": "human", "val'
    with pytest.raises(ConfigError, match=":3: not JSON"):
        read_trace(build.write(tmp_path, text))


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = build.write(tmp_path, "TIMESTAMP,ContextTokens\n")
    with pytest.raises(ConfigError, match=r":1: no column generatedtokens; expected columns timestamp,"):
        read_trace(path, "azure")
    with pytest.raises(ConfigError, match="no columns of lengths"):
        read_trace(path, "lengths")
    path = build.write(tmp_path, build.LENGTHS_TABLE)
    with pytest.raises(
        ConfigError, match=":1: no column of arrival times; expected one of arrival_s, arrived_at"
    ):
        read_trace(path, "timed-lengths")


def test_unknown_formats_say_what_there_is(tmp_path: Path) -> None:
    path = build.write(tmp_path, "a,b,c\n1,2,3\n")
    with pytest.raises(ConfigError, match=r"format is not known.*mooncake: JSON lines"):
        read_trace(path)
    with pytest.raises(ConfigError, match="unknown trace format 'csv'; there are azure, mooncake"):
        read_trace(path, "csv")
    with pytest.raises(ConfigError, match="folder without chunk-N-trace"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="is a folder"):
        read_trace(tmp_path, "azure")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nowhere")


def test_bytes_that_are_no_text_are_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"prompt_tokens,output_tokens\n1,2\n\xff\xfe,3\n")
    with pytest.raises(ConfigError, match=":3: prompt_tokens is"):
        read_trace(path)
    path.write_bytes(gzip.compress(build.AZURE.encode()))
    with pytest.raises(ConfigError):
        read_trace(path)
