"""Stages of IMPALA as a few CUDA kernels, where cuDNN takes some fifty."""

from onefold.fused.stages import Form, fits, pictures, stage

__all__ = ["Form", "fits", "pictures", "stage"]
