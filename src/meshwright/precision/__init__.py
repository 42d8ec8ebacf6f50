"""Number formats of a step: autocast, dynamic loss scaling, fp8."""
