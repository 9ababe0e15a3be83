"""OpenAI's API with vLLM's additions: bodies, prompts, endpoints and formats of answers."""
