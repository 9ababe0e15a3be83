"""Step times from files of measured layer times, in the format of LLMServingSim's profiler."""
