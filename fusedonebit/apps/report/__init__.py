"""``fusedonebit report``: one self-contained page of what runs have recorded."""
