"""``shoal static``: complete prompts in static batches, and report what they cost."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from shoal.cli.flags import ConfigFile, with_flags
from shoal.cli.output import STANDARD_OUTPUT, check_outputs, output_file
from shoal.cli.prompts import PromptLine, collect_prompts
from shoal.cli.sampling import IgnoreEos, MaxTokens, Stop, given_sampling
from shoal.config import ENGINE_FLAGS, parse_duration, parse_size
from shoal.config.setting_tree import Table
from shoal.core import ConfigError, SamplingParams

if TYPE_CHECKING:
    from shoal.frontend.offline_batch import Completion

T = TypeVar("T")

_FLAGS = tuple(flag for flag in ENGINE_FLAGS if flag.name == "device")
_BATCHING = "Static batching"


@with_flags(_FLAGS)
def static(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model, or a service of the configuration.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", help="Prompts: one a line, or JSON lines in *.jsonl; - is standard input."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the chat template.")] = False,
    preset: Annotated[
        str,
        typer.Option(
            help="SCLS and the steps to it: sls, so, pm, ab, lb, scls; or fifo, s3, odbs, slo-dbs, uellm, "
            "uellm-literal.",
            rich_help_panel=_BATCHING,
        ),
    ] = "scls",
    workers: Annotated[
        int, typer.Option(help="Static engines; they share the weights.", rich_help_panel=_BATCHING)
    ] = 2,
    slice_tokens: Annotated[
        int | None,
        typer.Option(
            "--slice",
            metavar="TOKENS",
            help="Most output tokens in one batch, after which a request returns to the pool.",
            rich_help_panel=_BATCHING,
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Most requests in one batch.", rich_help_panel=_BATCHING)
    ] = None,
    interval: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Shortest time between two formations of batches, e.g. 500ms.",
            rich_help_panel=_BATCHING,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Numbers of the paper that the preset takes: hf (transformers) or ds (DeepSpeed).",
            rich_help_panel=_BATCHING,
        ),
    ] = "hf",
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for the KV of all workers, e.g. 2GiB.", rich_help_panel=_BATCHING
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each worker.", rich_help_panel=_BATCHING)
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Serving times measured by `shoal profile`; a few small batches are timed if left out.",
            rich_help_panel=_BATCHING,
        ),
    ] = None,
    arrivals: Annotated[
        float | None,
        typer.Option(
            "--rate",
            metavar="PER_SECOND",
            help="Prompts arrive evenly at this rate, not all at once.",
            rich_help_panel=_BATCHING,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Write outputs as JSON lines, not to the screen; - is standard output.",
        ),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="PATH", help="Also write outputs and figures as JSON; - is standard output."
        ),
    ] = None,
    config: ConfigFile = None,
    max_tokens: MaxTokens = 128,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    *,
    settings: Table,
) -> None:
    """Complete prompts in static batches, as engines without continuous batching do.

    A batch is padded to its longest prompt and runs until all its requests have ended. Presets `so` to `scls`
    cut it into slices: requests that have not ended return to the pool and are batched again (SCLS). Decoding
    is greedy, so the outputs of all presets are the same; the table at the end shows their cost.

    **Examples:**

    `shoal static --model smollm2 --file prompts.jsonl --preset sls --workers 2`

    `shoal static --model smollm2 --file prompts.jsonl --preset scls --slice 32 --interval 500ms`
    """
    from rich.console import Console

    from shoal.cli.selection import select_service
    from shoal.cli.static_report import report_table

    check_outputs(output, json_path)
    options = select_service(model, file=config, settings=settings).engine_options()
    sampling = given_sampling(
        max_tokens=max_tokens, temperature=0.0, stop=tuple(stop or ()), ignore_eos=ignore_eos
    )
    lines = collect_prompts(prompts or (), file, sampling)
    if chat and any(not isinstance(line.prompt, str) for line in lines):
        raise ConfigError("--chat needs prompts as text, but one is a list of token ids")
    if arrivals is not None and not arrivals > 0:
        raise ConfigError(f"--rate must be more than 0 prompts a second, got {arrivals}")
    from shoal.static.serving.offline import StaticSetup, StaticShoal

    setup = StaticSetup(
        preset=preset,
        engine=engine,
        workers=workers,
        slice_tokens=slice_tokens,
        max_batch=max_batch,
        interval_s=_parsed("--interval", parse_duration, interval),
        device=options.device,
        threads=threads,
        kv_bytes=_parsed("--kv-memory", parse_size, kv_memory),
        profile=profile,
    )
    shoal = StaticShoal(options.services[0], setup)
    outcome = shoal.generate(
        [line.prompt for line in lines],
        [SamplingParams(**line.sampling) for line in lines],
        chat=chat,
        arrivals_s=None if arrivals is None else [number / arrivals for number in range(len(lines))],
    )
    completed = list(zip(lines, outcome.completions, strict=True))
    aside = STANDARD_OUTPUT in (output, json_path)
    if output is None:
        _print(completed, err=aside)
    else:
        written = [json.dumps(_as_json(*pair), ensure_ascii=False) + "\n" for pair in completed]
        with output_file(output) as path:
            path.write_text("".join(written), encoding="utf-8")
    Console(stderr=aside).print(report_table(preset, outcome.report))
    if json_path is not None:
        results = {
            "preset": preset,
            "workers": workers,
            "report": outcome.report.to_json(),
            "outputs": [_as_json(*pair) for pair in completed],
        }
        with output_file(json_path) as path:
            path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _parsed(flag: str, parse: Callable[[str], T], text: str | None) -> T | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _print(completed: "list[tuple[PromptLine, Completion]]", *, err: bool) -> None:
    for number, (line, completion) in enumerate(completed, 1):
        typer.secho(f"[{number}] {line.prompt!r:.70}", dim=True, err=err)
        text = completion.text if completion.error is None else f"failed: {completion.error}"
        typer.echo(text, err=err)


def _as_json(line: PromptLine, completion: "Completion") -> dict[str, Any]:
    record = completion.record
    return {
        "prompt": line.prompt,
        **asdict(completion),
        "record": record and {"first_token_s": record.ttft_s, "response_s": record.e2e_s},
    }
