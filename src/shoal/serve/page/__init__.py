"""The page at ``/``: its static files, and the live state of engines, services and requests that it shows."""
