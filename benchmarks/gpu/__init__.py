"""``make gpu``: all that one CUDA GPU is asked, in processes that can't take each other along, and one report."""
