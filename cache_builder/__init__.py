"""Stage one: run the target over a dataset and write its hidden states to a cache."""
