"""Operations on lists of tensors in one kernel, for which torch has private names only (`torch._foreach_*`).

A loop over the tensors would launch one kernel for each: hundreds of small ones per step. torch documents the
foreach functions as beta; its own optimizers are built on them. A trailing underscore means in place, as in
torch.
"""

import torch

add = torch._foreach_add
add_ = torch._foreach_add_
copy_ = torch._foreach_copy_
div = torch._foreach_div
div_ = torch._foreach_div_
mul = torch._foreach_mul
mul_ = torch._foreach_mul_
norm = torch._foreach_norm
sqrt = torch._foreach_sqrt
zero_ = torch._foreach_zero_
