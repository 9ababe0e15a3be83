"""Small trace files and rows."""

import json
from pathlib import Path

from shoal.workload import TraceRow

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 513, "output_length": 6, "hash_ids": [0, 7]}
"""
BAILIAN = """{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, \
"output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090, 7182]}
{"chat_id": 160, "parent_chat_id": -1, "timestamp": 62, "input_length": 3, "output_length": 9, \
"type": "search", "turn": 1, "hash_ids": [5]}
{"chat_id": 7, "parent_chat_id": 159, "timestamp": 65.5, "input_length": 48, "output_length": 8, \
"type": "text", "turn": 2, "hash_ids": [1089, 1090, 7183]}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118.5,GPT-4,417,276,693,API log
"""
BURSTGPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,\
Log Type
5,3,1.5,ChatGPT,472,18,490,Conversation log
"""
LENGTHS_TABLE = "prompt_tokens,output_tokens\n10,20\n0,5\n30,40\n"
TIMED_LENGTHS = "req_id,client,arrival_s,prompt_len,output_len\n0,a,0.0,13,199\n1,b,0.207938,36,137\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,374,44\n4.814579,396,109\n2.0,10,0\n"
TURNS = """conv,turn,role,tokens
0,0,human,34
0,1,gpt,244
0,2,human,36
0,3,gpt,320
1,0,gpt,7
1,1,human,9
1,2,gpt,11
"""
REQUESTS = """{"request_id": "a", "input_toks": 2358, "output_toks": 531, "arrival_time": 1787267980.0}
{"request_id": "b", "input_toks": 1034, "output_toks": 769, "arrival_time": 1787267980.5}
"""
INVOCATIONS = "app,func,end_timestamp,duration\nA,f,10.0,4.0\nA,g,9.0,8.5\n"
COUNTS = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\no,A,f,http,2,0,1\no,B,g,queue,0,3,0\n"
SHAREGPT = json.dumps(
    [
        {
            "id": "x",
            "conversations": [
                {"from": "human", "value": "a" * 40},
                {"from": "gpt", "value": "b" * 80},
                {"from": "human", "value": "c" * 2},
                {"from": "gpt", "value": "d" * 8},
            ],
        },
        {"id": "y", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": ""}]},
    ],
    indent=1,
)


def write(folder: Path, text: str, name: str = "trace") -> Path:
    """A file with this text."""
    path = folder / name
    path.write_text(text)
    return path


def lengths(rows: list[TraceRow]) -> list[tuple[int, int]]:
    return [(row.prompt_tokens, row.output_tokens) for row in rows]


def row(
    arrival: int = 0,
    prompt: int = 100,
    output: int = 10,
    client: str | None = None,
    hashes: tuple[int, ...] = (),
) -> TraceRow:
    return TraceRow(arrival, prompt, output, client, hashes)
