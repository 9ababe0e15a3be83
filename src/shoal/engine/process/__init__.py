"""The engine process: server, start by an owner, heartbeats, detection of hung steps, crash journal."""
