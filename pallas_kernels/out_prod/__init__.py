"""Matrix products in every orientation, with the tail of an adapter."""
