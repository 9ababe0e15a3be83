"""Parts of the GPU check, named as on its command line; each has ``run(cases)``."""
