"""OpenAI's responses (/v1/responses), without state: a request has its whole history, nothing is stored."""
