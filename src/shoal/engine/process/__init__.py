"""The engine in a process of its own: its server, its owner's child, signs of life, watch on steps."""
