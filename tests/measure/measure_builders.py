"""Small requests, and whole runs drawn at random from a seed."""

import numpy as np

from shoal.core import SLO
from shoal.measure import EngineTotals, RequestRow, RunRecord, Sample, StepSpan

NS = 1_000_000_000


def make_row(name="r0", *, service="chat", arrival=0.0, first=1.0, end=3.0, output=5, finish="stop", **more):
    """A request; times in seconds."""
    first_ns, end_ns = (round(first * NS), round(end * NS)) if output else (round(end * NS),) * 2
    return RequestRow(
        request_id=name,
        service=service,
        arrival_ns=round(arrival * NS),
        first_token_ns=first_ns,
        finish_ns=end_ns,
        prompt_tokens=more.pop("prompt", 10),
        output_tokens=output,
        engine=more.pop("engine", 0),
        finish=finish,
        **more,
    )


def refused_row(name="refused", *, service="chat", arrival=0.0, **more):
    return make_row(
        name, service=service, arrival=arrival, end=arrival, output=0, finish="refused", engine=-1,
        error="needs 9,000 blocks, the pool has 100", **more,
    )  # fmt: skip


def make_totals(steps=10, mean=0.5, peak=0.9, **more):
    return EngineTotals(
        steps=steps,
        decode_steps=steps,
        busy_ns=more.pop("busy_ns", NS),
        kv_used_mean=mean,
        kv_used_peak=peak,
        preemptions=more.pop("preemptions", 0),
        recomputed_tokens=0,
        swapped_tokens=0,
        prefill_tokens=100,
        cached_tokens=0,
        output_tokens=50,
        **more,
    )


def make_run(rows=(), **more):
    rows = list(rows)
    more.setdefault("end_ns", max((row.finish_ns for row in rows), default=0))
    return RunRecord(
        title=more.pop("title", "a run"),
        requests=rows,
        samples=more.pop("samples", ()),
        engines=more.pop("engines", (make_totals(),)),
        **more,
    )


def random_run(requests=300, samples=200, engines=2, services=("chat", "complete", "summarise"), seed=0):
    """A run as a real one looks: rising load, long tails, a few refused, failed and cancelled requests."""
    draw = np.random.default_rng(seed)
    rate = 12.0
    arrivals = np.cumsum(draw.exponential(1 / rate, requests) * NS).astype(np.int64)
    rows = []
    for number in range(requests):
        service = int(draw.choice(len(services), p=_shares(len(services))))
        name, ending = services[service], draw.random()
        slo = SLO(ttft_s=0.8, tpot_s=0.04) if service == 0 else SLO(e2e_s=20.0) if service == 1 else SLO()
        prompt = int(draw.lognormal(6.0 + 0.3 * service, 1.0)) + 1
        more = {"service": name, "prompt": prompt, "slo": slo, "arrival": arrivals[number] / NS}
        if ending < 0.01:
            rows.append(refused_row(f"r{number}", arrival=more["arrival"], service=name, slo=slo))
            continue
        tokens = int(draw.lognormal(4.5, 0.9)) + 1
        load = 1 + 1.5 * np.sin(3.1 * number / requests) ** 4
        first = more["arrival"] + draw.lognormal(-2.2, 0.9) * load**2
        tpot = 0.018 * load * draw.lognormal(0, 0.18) * (1 + 0.3 * service)
        finish = "error" if ending < 0.013 else "cancelled" if ending < 0.02 else "stop"
        rows.append(
            make_row(
                f"r{number}",
                first=first,
                end=first + tpot * (tokens - 1),
                output=tokens,
                finish=finish,
                error="the engine ended" if finish == "error" else None,
                engine=int(draw.integers(engines)),
                largest_gap_ns=int(tpot * draw.lognormal(1.2, 0.6) * NS) if tokens > 1 else 0,
                preemptions=int(draw.random() < 0.04 * load),
                recomputed_tokens=int(prompt * (draw.random() < 0.04)),
                cached_tokens=prompt // 2 if draw.random() < 0.3 else 0,
                **more,
            )
        )
    rows.sort(key=lambda row: row.finish_ns)
    end_ns = max((row.finish_ns for row in rows), default=0)
    return RunRecord(
        title="Three services on two engines",
        requests=rows,
        samples=_samples(draw, samples, engines, end_ns),
        engines=[make_totals(5000 + 100 * engine, 0.6, 0.97, preemptions=9) for engine in range(engines)],
        spans=_spans(draw, min(samples, 200), engines, services, end_ns),
        execution_s={services[0]: 2.1} if services else {},
        end_ns=end_ns,
        facts={
            "trace": "azure-conversation.csv",
            "models": "Llama-2-7B, Qwen2.5-7B",
            "device": "A100-80, tp 1",
            "preset": "seallm",
            "seed": str(seed),
        },
    )


def _shares(count):
    weights = np.arange(count, 0, -1.0)
    return weights / weights.sum()


def _samples(draw, count, engines, end_ns):
    samples = []
    for number in range(count // engines):
        where = number / max(count // engines, 1)
        load = np.sin(3.1 * where) ** 2
        for engine in range(engines):
            used = float(np.clip(0.15 + 0.75 * load + draw.normal(0, 0.04), 0, 1))
            waiting = int(max(0, draw.poisson(40 * max(load - 0.6, 0) * (1 + engine))))
            running, rate = int(draw.poisson(2 + 60 * load)), float(draw.normal(1500 * load + 50, 30))
            samples.append(Sample(int(where * end_ns), engine, waiting, running, used, abs(rate)))
    return samples


def _spans(draw, count, engines, services, end_ns):
    spans = []
    for number in range(count):
        start = int(number / count * end_ns)
        steps = int(draw.integers(1, 5))
        end = start + int(end_ns / count * 0.9)
        prefill = 0 if steps > 1 else int(draw.integers(0, 900))
        service = services[number % len(services)]
        spans.append(
            StepSpan(number % engines, service, start, end, steps, int(draw.integers(1, 60)), prefill)
        )
    return spans
