"""Chat templates: Jinja sources that turn a conversation into one prompt."""
