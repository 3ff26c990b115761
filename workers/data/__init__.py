"""From chat lines to micro-batches. A global batch is a list of samples; nothing here depends on the number of ranks but their
share."""
