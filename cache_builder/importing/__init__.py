"""Hidden states that other tools captured, imported into a cache."""
