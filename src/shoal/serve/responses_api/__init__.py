"""OpenAI's Responses API (/v1/responses), stateless: a request has the whole history, nothing is stored."""
