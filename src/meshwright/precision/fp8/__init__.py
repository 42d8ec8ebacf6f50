"""Linear layers in fp8: what a recipe is, how numbers become fp8, the three products of a linear."""
