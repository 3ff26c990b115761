"""Where jobs can run: which launcher the settings choose, and what its machines have."""
