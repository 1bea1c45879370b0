"""Save and load: ``state_dict``, ``torch.distributed.checkpoint``, other numbers of ranks."""
