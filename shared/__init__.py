"""The contract between the two stages: what is on disk, and how to say no."""
