"""The parts of the GPU check, by their names on its command line."""
