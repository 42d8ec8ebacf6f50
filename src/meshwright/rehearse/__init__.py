"""Be any rank of any world on one machine: what it allocates, sends and computes."""
