"""The Python face of the verbs: `plan`, `predict`, `check` and `train` return objects that notebooks draw.

Thin over what the command line uses; importing it needs no torch.
"""
