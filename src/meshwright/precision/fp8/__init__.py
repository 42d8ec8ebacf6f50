"""Linear layers in fp8: recipes, quantisation, and the three GEMMs of a linear (forward, dgrad, wgrad)."""
