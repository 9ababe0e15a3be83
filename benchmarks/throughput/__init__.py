"""Throughput of Shoal (offline, HTTP), vLLM, OpenVINO and llama.cpp on the same prompts."""
