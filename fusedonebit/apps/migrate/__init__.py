"""What a DeepSpeed config becomes (``fusedonebit migrate``); ``fusedonebit.deepspeed`` does it."""
