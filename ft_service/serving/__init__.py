"""From a tuned model to an answer: the preview on this host, and the hand-off to inference servers."""
