"""What a whole DeepSpeed config becomes, key by key: the command ``fusedonebit migrate``."""
