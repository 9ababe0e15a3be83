"""The GPU check: correctness and speed of Shoal on a GPU, in parts, each a process with a time limit."""
