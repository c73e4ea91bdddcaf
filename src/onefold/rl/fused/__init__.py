"""Optional CUDA kernels that compute a whole stage of an IMPALA network; cuDNN needs about fifty kernels for it.

Importing the package registers them with `onefold.nn.nets`; `nets.fuse` then uses them where sizes and device allow it.
"""

from onefold.nn import nets
from onefold.rl.fused import stages

nets.fused_stages = stages
