"""A Hugging Face model folder: its configuration files, weight headers, facts and checks."""
