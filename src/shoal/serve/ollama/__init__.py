"""Ollama's API, translated to and from OpenAI's."""
