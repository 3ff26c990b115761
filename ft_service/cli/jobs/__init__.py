"""Commands about the jobs of a server: submit, list, look into, watch, stop, compare, fetch and remove."""
