"""Seconds of a step: kernels, collectives, exposed communication, the pipeline bubble, the update."""
