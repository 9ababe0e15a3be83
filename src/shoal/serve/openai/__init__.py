"""OpenAI's API with vLLM's additions: request bodies, endpoints, prompts of chats, and response formats."""
