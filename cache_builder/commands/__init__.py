"""The commands of `cache-builder`, by what they are for."""
