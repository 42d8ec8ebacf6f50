"""The parts a decoder is assembled from."""
