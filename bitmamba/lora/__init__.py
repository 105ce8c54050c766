"""Adapters: where they stand, their first values, what they cover, and merging."""
