"""One attempt on one node: the parent of torchrun, and how torchrun is called."""
