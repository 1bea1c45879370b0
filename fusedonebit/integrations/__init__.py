"""Work with what others have made: DDP, loss scalers, torch.compile, DeepSpeed."""

from . import deepspeed as deepspeed  # so that optimizers have ``from_deepspeed``
