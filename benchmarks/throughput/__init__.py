"""Offline and HTTP throughput of Shoal, vLLM, OpenVINO and llama.cpp on the same prompts."""
