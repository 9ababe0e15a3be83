"""The client's side of an engine: text, stop strings, limits of a request, and the offline interface.

Here belong checks before a request goes to an engine, the connection to an engine process, tokens into text,
streams, and ``Shoal``, which runs models in this process. An engine process never imports this. HTTP is
``serve``'s; several engines are ``cluster``'s.
"""
