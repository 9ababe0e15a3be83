"""HTTP below the APIs: connections, time-outs, allowed hosts, API keys, logs, errors, health and docs."""
