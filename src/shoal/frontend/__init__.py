"""The client's side of an engine: validation, detokenization, stop strings, streams, and the offline API.

This package also has the connection to an engine process, and ``Shoal``, which runs models in this process.
An engine process never imports it. HTTP is in ``serve``, the management of several engines in ``cluster``.
"""
