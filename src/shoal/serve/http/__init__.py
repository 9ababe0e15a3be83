"""One HTTP request, whatever it asks for: connections, limits, hosts, keys, logs, errors."""
