"""Ollama's API: its requests become OpenAI's, and the answers its own."""
