"""Where a rank is, from stacks as faulthandler writes them."""

from meshwright.launch.stack_report import where_is

WAITING = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/w/src/meshwright/resilience/watchdog.py", line 180 in _run

Current thread 0x00007f2b (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3004 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/w/src/meshwright/parallel/dp.py", line 88 in reduce
  File "/w/src/meshwright/train/loop.py", line 67 in drive
"""
COMPUTING = """Current thread 0x00007f2b (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134 in forward
  File "/w/src/meshwright/models/decoder.py", line 12 in forward
"""


def test_a_rank_in_a_collective_and_one_that_is_missing():
    assert where_is(WAITING) == "in all_reduce, called from parallel/dp.py:88 in reduce"
    assert where_is(COMPUTING) == "in no collective: models/decoder.py:12 in forward"
    assert where_is("") == "wrote no stack: it is not running Python code"
