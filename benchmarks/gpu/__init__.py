"""``make gpu-check`` and its like: what one CUDA GPU is asked, by processes that end alone, and one report."""
