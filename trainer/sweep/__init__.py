"""Many runs on one cache: `trainer sweep`."""
