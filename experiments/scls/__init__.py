"""Experiments of the SCLS paper: slice-level scheduling of static batches."""
