"""Networks, the training loop, augmentations and CUDA graphs."""
