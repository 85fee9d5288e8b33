"""Explains a run from what it wrote: names each fault, its steps, the evidence and the remedy."""
