"""Update rules, parameter groups, gradient norm and the learning rate, on plain local tensors."""
