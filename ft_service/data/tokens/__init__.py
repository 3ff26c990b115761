"""Chat lines as tokens: for workers, and for the process next to the service that counts them; the
service never imports this.

It needs transformers, and no torch.
"""
