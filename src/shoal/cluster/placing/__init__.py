"""Placement that follows the load: traffic facts, search task, controller, changes in steps, the loop."""
