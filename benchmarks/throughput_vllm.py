"""vLLM's part of `benchmarks/throughput.py`; runs in a virtual environment that has vLLM.

Arguments: model folder, prompt tokens, output tokens, rounds, concurrencies. Prints one JSON line:
output tokens per second of every round, by concurrency.
"""

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, (length, output, rounds, *concurrencies) = sys.argv[1], [int(a) for a in sys.argv[2:]]
    llm = LLM(folder, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)

    def run(count: int, round_number: int) -> float:
        prompts = [
            {
                "prompt_token_ids": [
                    (1000 + 131 * i + 17 * j + 7919 * round_number) % 40_000 + 100 for j in range(length)
                ]
            }
            for i in range(count)
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - started)

    run(2, 99)
    print(json.dumps({c: [run(c, r) for r in range(rounds)] for c in concurrencies}))


if __name__ == "__main__":
    main()
