"""Stage two: train a DFlash drafter from a cache, without the target."""
