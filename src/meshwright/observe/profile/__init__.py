"""What a recorded step says: a profiler trace as operator classes, matmuls, gaps, memory and advice."""
