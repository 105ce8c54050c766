"""The product of int8 activations with ternary weights, scaled."""
