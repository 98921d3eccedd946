"""A package, as in the original."""
