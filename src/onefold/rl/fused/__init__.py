"""Optional CUDA kernels: a stage of IMPALA in a few kernels, where cuDNN takes some fifty.

Importing the package registers them with `onefold.nn.nets`; `fuse` turns them on for a module.
"""

from onefold.nn import nets
from onefold.rl.fused.stages import Form, fits, pictures, stage
from onefold.rl.fused.trunks import forms, fuse, fused_trunks

nets.fused_trunks = fused_trunks

__all__ = ["Form", "fits", "forms", "fuse", "fused_trunks", "pictures", "stage"]
