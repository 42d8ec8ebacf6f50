"""Number formats of a step: autocast and dynamic loss scaling."""
