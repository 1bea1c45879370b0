"""``fusedonebit train``: a byte-level language model, the package's main job and its example."""
