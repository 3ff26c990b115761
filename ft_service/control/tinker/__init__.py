"""Models and samples of Tinker clients."""
