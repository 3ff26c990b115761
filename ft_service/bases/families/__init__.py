"""What no rule says about an architecture: one small file a family. Most families need none."""
