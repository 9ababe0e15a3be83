"""``shoal generate``: complete prompts in this process."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.flags import ConfigFile, with_flags
from shoal.cli.output import STANDARD_OUTPUT, check_outputs, output_file
from shoal.cli.prompts import PromptLine, collect_prompts
from shoal.cli.sampling import (
    Choices,
    IgnoreEos,
    MaxTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    given_sampling,
)
from shoal.config import ENGINE_FLAGS
from shoal.config.setting_tree import Table
from shoal.core import ConfigError

if TYPE_CHECKING:
    from shoal.frontend.offline_batch import RequestOutput


@with_flags(ENGINE_FLAGS)
def generate(
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
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Also write the results as JSON; - is standard output."),
    ] = None,
    config: ConfigFile = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    n: Choices = 1,
    ignore_eos: IgnoreEos = False,
    *,
    settings: Table,
) -> None:
    """Complete prompts with a model loaded in this process.

    **Examples:**

    `shoal generate --model gemma3-270m "The capital of France is" --max-tokens 16 --temperature 0`

    `shoal generate --model smollm2 --chat "Why is the sky blue?" "Why is grass green?"`

    `shoal generate --model smollm2 --file prompts.jsonl --json results.json`
    """
    from shoal.cli.selection import select_service

    check_outputs(json_path)
    options = select_service(model, file=config, settings=settings).engine_options()
    sampling = given_sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        n=n,
        ignore_eos=ignore_eos,
    )
    lines = collect_prompts(prompts or (), file, sampling)
    if chat and any(not isinstance(line.prompt, str) for line in lines):
        raise ConfigError("--chat needs prompts as text, but one is a list of token ids")
    from shoal.frontend.offline_api import Shoal

    with Shoal(
        options.services,
        kv_cache=options.kv_cache,
        scheduler=options.scheduler,
        weights=options.weights,
        device=options.device,
        threads=options.threads,
        attention=options.attention,
    ) as shoal:
        sampling_params = [line.sampling for line in lines]
        if chat:
            outputs = shoal.chat(
                [[{"role": "user", "content": line.prompt}] for line in lines], sampling_params
            )
        else:
            outputs = shoal.generate([line.prompt for line in lines], sampling_params)
    _print(lines, outputs, err=json_path == STANDARD_OUTPUT)
    if json_path is not None:
        results = [_as_json(line, output) for line, output in zip(lines, outputs, strict=True)]
        with output_file(json_path) as path:
            path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _print(lines: list[PromptLine], outputs: "list[RequestOutput]", *, err: bool) -> None:
    single = len(lines) == 1 and len(outputs[0].outputs) == 1
    for number, (line, output) in enumerate(zip(lines, outputs, strict=True), 1):
        for completion in output.outputs:
            if not single:
                choice = f".{completion.choice + 1}" if len(output.outputs) > 1 else ""
                typer.secho(f"[{number}{choice}] {line.prompt!r:.70}", dim=True, err=err)
            text = completion.text if completion.error is None else f"failed: {completion.error}"
            typer.echo(text, err=err)


def _as_json(line: PromptLine, output: "RequestOutput") -> dict[str, Any]:
    completions = []
    for completion in output.outputs:
        values = asdict(completion)
        record = completion.record
        values["record"] = record and {
            "ttft_s": record.ttft_s,
            "tpot_s": record.tpot_s,
            "mtpot_s": record.mtpot_s,
            "e2e_s": record.e2e_s,
        }
        completions.append(values)
    return {"prompt": line.prompt, "outputs": completions}
