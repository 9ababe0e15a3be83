"""Accuracy of the learned length predictor on answers of a real model.

    python -m benchmarks.length_predictor [--model smollm2] [--seeds 5] [--json PATH]

Two kinds of questions, 150 of each (15 wordings x 10 subjects): one asks for a few words, one for a long
text. The model answers all of them greedily, with at most 192 tokens. Then the lengths go through the
predictor in random order, each predicted before it is learnt. Prints, for every 50 requests, the share of
correctly predicted buckets, the share of the window's most common bucket, and the difference; then the same
over all requests after the 200th, for several orders.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal import SamplingParams, Shoal
from shoal.core import Request
from shoal.forecast import LearnedLengths

MAX_TOKENS = 192
WINDOW = 50
LESSON = 8
LEARNT_AFTER = 200
"""Requests before the final accuracy counts."""

SHORT_WORDINGS = (
    "Reply with one word: what do you think of first when you hear {}?",
    "In one word, what colour is {}?",
    "Is {} a good thing? Reply with one word, yes or no.",
    "Name the opposite of {} in one word.",
    "Is the sentence positive or negative: 'I love {}'? Reply with one word.",
    "Translate {} into French. Give only the words.",
    "Where would I find {}? Answer in three words at most.",
    "Reply with one word: which letter does {} begin with?",
    "Is {} larger than a house? Reply with one word.",
    "Which category fits {} best: object, place or idea? One word.",
    "Reply with one word: who uses {}?",
    "Reply with one word: in which season is {} most common?",
    "Give me one word that rhymes with {}.",
    "Reply with one word: what is {} made of?",
    "Spell {} correctly. Reply with the word alone.",
)
LONG_WORDINGS = (
    "Write a long story about {}.",
    "Write a long essay about {}.",
    "Write a detailed guide for beginners about {}.",
    "Tell me everything about the history of {}.",
    "Explain in detail, step by step, how {} came to be.",
    "Write several paragraphs on why {} matters to people.",
    "Compose a long dialogue between two friends who discuss {}.",
    "Write a long letter to a museum that wants to show {}.",
    "Describe {} at length, with as many examples as you can.",
    "Write a chapter of a textbook about {}.",
    "Write a long speech in praise of {}.",
    "Discuss the advantages and drawbacks of {} in great detail.",
    "Write a fairy tale in which {} saves a village.",
    "Plan a course of ten lessons about {} and explain each lesson.",
    "Write a newspaper report about a festival of {}, with interviews.",
)
SUBJECTS = (
    "a lighthouse",
    "fresh bread",
    "a red bicycle",
    "gardening",
    "the violin",
    "winter",
    "a harbour",
    "honesty",
    "the steam engine",
    "coffee",
)


@dataclass(frozen=True)
class Answered:
    """One question, and the number of tokens of its answer."""

    kind: str
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Window:
    """Accuracies in percent over ``requests`` requests that end with number ``until``."""

    until: int
    requests: int
    accuracy: float
    majority: float

    @property
    def gain(self) -> float:
        """Accuracy above that of the most common bucket, in percentage points."""
        return self.accuracy - self.majority


def ask(model: str) -> list[Answered]:
    """The model's answers to all questions."""
    kinds = [("short", w.format(s)) for w in SHORT_WORDINGS for s in SUBJECTS]
    kinds += [("long", w.format(s)) for w in LONG_WORDINGS for s in SUBJECTS]
    with Shoal(model, progress=False) as shoal:
        outputs = shoal.chat(
            [[{"role": "user", "content": question}] for _, question in kinds],
            SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        )
    return [
        Answered(kind, output.prompt_token_ids, len(output.outputs[0].tokens))
        for (kind, _), output in zip(kinds, outputs, strict=True)
    ]


def stream(answered: Sequence[Answered], seed: int) -> tuple[list[tuple[int, int]], LearnedLengths]:
    """(predicted, true) bucket of each request in random order, and the predictor."""
    predictor = LearnedLengths(MAX_TOKENS)
    order = random.Random(seed).sample(list(answered), len(answered))
    buckets = []
    for number, one in enumerate(order):
        request = Request(
            id=str(number),
            service="questions",
            prompt=one.prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        )
        predicted = predictor.predict(request, 0, MAX_TOKENS)
        buckets.append((predictor.bucket_of(predicted), predictor.bucket_of(one.output_tokens)))
        predictor.record(request, one.output_tokens)
    return buckets, predictor


def window_of(buckets: Sequence[tuple[int, int]], start: int, until: int) -> Window:
    part = buckets[start:until]
    hits = sum(predicted == true for predicted, true in part)
    [(_, most_common)] = Counter(true for _, true in part).most_common(1)
    return Window(until, len(part), 100 * hits / len(part), 100 * most_common / len(part))


def time_calls(answered: Sequence[Answered]) -> dict[str, float]:
    """Median milliseconds of predictions, of records, and of records that train the classifier."""
    predictor = LearnedLengths(MAX_TOKENS, batch=LESSON)
    predicting, recording = [], []
    for number, one in enumerate(answered):
        request = Request(id=str(number), service="questions", prompt=one.prompt)
        started = time.perf_counter()
        predictor.predict(request, 0, MAX_TOKENS)
        between = time.perf_counter()
        predictor.record(request, one.output_tokens)
        predicting.append(1e3 * (between - started))
        recording.append(1e3 * (time.perf_counter() - between))
    lessons = recording[LESSON - 1 :: LESSON]
    spent = {"predict_ms": predicting, "record_ms": recording, "lesson_ms": lessons}
    return {name: statistics.median(values) for name, values in spent.items()}


def print_lengths(console: Console, answered: Sequence[Answered], bounds: Sequence[int]) -> None:
    edges = [f"{low + 1}-{high}" for low, high in zip((0, *bounds), bounds, strict=False)]
    table = Table("kind", "requests", *edges, title="output tokens, by bucket")
    predictor = LearnedLengths(MAX_TOKENS)
    for kind in ("short", "long"):
        lengths = [one.output_tokens for one in answered if one.kind == kind]
        counts = Counter(predictor.bucket_of(length) for length in lengths)
        table.add_row(kind, str(len(lengths)), *(str(counts[place]) for place in range(len(bounds))))
    console.print(table)


def print_windows(console: Console, windows: Sequence[Window], title: str, first: str) -> None:
    table = Table(first, "requests", "predicted %", "most common bucket %", "gain, points", title=title)
    for window in windows:
        shares = (window.accuracy, window.majority, window.gain)
        table.add_row(str(window.until), str(window.requests), *(f"{share:.1f}" for share in shares))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, default=5, help="orders in which the requests are streamed")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    console = Console()
    answered = ask(args.model)
    streams = [stream(answered, seed) for seed in range(args.seeds)]
    buckets, predictor = streams[0]
    print_lengths(console, answered, predictor.bounds)
    windows = [window_of(buckets, at, at + WINDOW) for at in range(0, len(buckets), WINDOW)]
    print_windows(console, windows, "one order, every 50 requests", "until request")
    later = [window_of(buckets, LEARNT_AFTER, len(buckets)) for buckets, _ in streams]
    print_windows(console, later, f"after {LEARNT_AFTER} requests, one line for each order", "until request")
    timings = time_calls(answered)
    console.print(", ".join(f"{name} {value:.2f}" for name, value in timings.items()))
    worst = min(window.gain for window in later)
    console.print(f"least gain after {LEARNT_AFTER} requests: {worst:.1f} points (at least 20 wanted)")
    if args.json:
        figures = {
            "bounds": predictor.bounds,
            "windows": [asdict(window) for window in windows],
            "later": [asdict(window) for window in later],
            "timings": timings,
        }
        args.json.write_text(json.dumps(figures, indent=1))
    raise SystemExit(worst < 20)


if __name__ == "__main__":
    main()
