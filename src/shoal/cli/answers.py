"""What a server says where it refuses a request."""

import httpx


def error_message(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape, or the body as it is."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def error_code(response: httpx.Response) -> str | None:
    """The code of an error in OpenAI's shape."""
    try:
        return str(response.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None
