// What the chunks of an answer's stream add up to.

/** Adds chunks of chat completions and completions; take() says what each adds. */
export class GenerationStream {
  text = "";
  reasoning = "";
  toolCalls = []; // of the chat format, with arguments as far as they have come
  tokens = []; // {token, logprob, alternatives: [[token, logprob]]}, if log-probabilities were asked for
  finish = null;
  usage = null;

  /** Raises an Error for an error within the stream; returns whether the chunk had output. */
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return false;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    this.#takeLogprobs(choice.logprobs);
    const delta = choice.delta ?? { content: choice.text };
    this.text += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    for (const part of delta.tool_calls ?? []) this.#takeCall(part);
    return Boolean(delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls?.length);
  }

  /** The assistant's message, for the next request of the conversation. */
  get message() {
    const message = { role: "assistant", content: this.text };
    if (this.toolCalls.length) message.tool_calls = this.toolCalls;
    return message;
  }

  #takeCall({ index, id, function: called = {} }) {
    const call = (this.toolCalls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
    if (called.name) call.function.name = called.name;
    call.function.arguments += called.arguments ?? "";
  }

  #takeLogprobs(logprobs) {
    for (const { token, logprob, top_logprobs: top = [] } of logprobs?.content ?? []) {
      this.tokens.push({ token, logprob, alternatives: top.map((other) => [other.token, other.logprob]) });
    }
    for (const [index, token] of (logprobs?.tokens ?? []).entries()) {
      const alternatives = Object.entries(logprobs.top_logprobs?.[index] ?? {});
      this.tokens.push({ token, logprob: logprobs.token_logprobs[index], alternatives });
    }
  }
}
