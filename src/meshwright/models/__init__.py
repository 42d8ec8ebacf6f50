"""The decoder and its layers; they know nothing of meshes and ranks."""

from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.initialise import initialise

__all__ = ["Decoder", "build_decoder", "initialise"]
